"""``CheckedNumbers``: numbers of a file that describes how a model sees images."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rustvllm.config.vision import CHANNELS
from rustvllm.exceptions import ModelLoadError


@dataclass(frozen=True, slots=True)
class CheckedNumbers:
    """Values of a file; every method raises ``ModelLoadError``, which names the file, if its value is wrong.

    Attributes:
        values: The values by name.
        file: What they were read from.
    """

    values: Mapping[str, Any]
    file: Path

    def integer(self, name: str, default: int, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """An integer from ``least`` to ``most``; ``default`` if it is missing or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limits = f"of at least {least}" if most == 2**31 - 1 else f"from {least} to {most}"
            raise ModelLoadError(f"{self.file}: {name} must be an integer {limits}, got {value!r:.80}")
        return value

    def named(self, names: tuple[str, ...], default: int) -> int:
        """The first of these that is there, which is a token's id."""
        return self.integer(next((name for name in names if name in self.values), names[0]), default, least=0)

    def number(self, name: str, default: float) -> float:
        """A positive number; ``default`` if it is missing or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ModelLoadError(f"{self.file}: {name} must be a positive number, got {value!r:.80}")
        return float(value)

    def channels(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A number for each channel; ``default`` if they are missing or null."""
        value = self.values.get(name)
        value = list(default) if value is None else value
        is_numbers = isinstance(value, list) and len(value) == CHANNELS
        if not is_numbers or not all(type(each) in (int, float) and -1e6 < each < 1e6 for each in value):
            raise ModelLoadError(f"{self.file}: {name} must be {CHANNELS} numbers, got {value!r:.80}")
        if name == "image_std" and 0 in value:
            raise ModelLoadError(f"{self.file}: {name} must not hold 0, got {value!r:.80}")
        return tuple(map(float, value))

    def side(self, name: str, key: str, default: int) -> int:
        """A number of an object such as ``{"height": 336, "width": 336}``; older files have the number alone."""
        value = self.values.get(name)
        value = default if value is None else value
        value = value.get(key) if isinstance(value, Mapping) else value
        return CheckedNumbers({f"{name} ({key})": value}, self.file).integer(f"{name} ({key})", default)

    def require(self, *names: str) -> None:
        """Check that these are true or missing."""
        for name in names:
            if self.values.get(name, True) is not True:
                raise ModelLoadError(f"{self.file}: {name} must be true, got {self.values[name]!r:.80}")
