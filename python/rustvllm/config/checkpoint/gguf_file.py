"""Opens a GGUF file as a model, with errors that say what to do, and reads its values with type checks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rustvllm import _core
from rustvllm.config.checkpoint.lfs_pointer import what_to_do
from rustvllm.config.checkpoint.whole_forms import NumberForm
from rustvllm.exceptions import ModelLoadError

SUFFIX: Final = ".gguf"
FLOAT_TYPES: Final = ("F32", "F16", "BF16")
"""Types that torch has, too."""
WHOLE_TYPES: Final[Mapping[str, NumberForm]] = {
    "Q8_0": NumberForm(32, 8, "f16"),
    "Q4_0": NumberForm(32, 4, "f16"),
    "Q4_1": NumberForm(32, 4, "f16", "minimum"),
    "Q5_0": NumberForm(32, 8, "f16"),
    "Q5_1": NumberForm(32, 8, "f16", "minimum"),
    "Q4_K": NumberForm(32, 4, "two-level", "minimum"),
    "Q5_K": NumberForm(32, 8, "two-level", "minimum"),
    "Q6_K": NumberForm(16, 6, "two-level"),
    "IQ4_NL": NumberForm(32, 8, "f16"),
    "MXFP4": NumberForm(32, 4, "bf16", "codes"),
}
"""Types whose numbers are whole ones with scales → how the CPU keeps them: as they are."""
SERVED_TYPES: Final = (*FLOAT_TYPES, *WHOLE_TYPES)
"""Tensor types that rustvllm reads."""
_PLURALS: Final[Mapping[type, str]] = {str: "texts", int: "whole numbers", float: "numbers"}
_MAX_NAMED: Final = 4


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, and not a model's folder."""
    return path.suffix.lower() == SUFFIX


class GgufFile:
    """The header of a model's GGUF file, or those of all its files.

    Args:
        path: The file, or the first of several.

    Attributes:
        path: Likewise.
        header: What the core read.
        architecture: ``general.architecture``.

    Raises:
        ModelLoadError: The file cannot be read, is damaged, or is not a model's.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.header = _core.GgufFile(path)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{error}{what_to_do(path)}") from error
        self.path = path
        kind = self.text("general.type", "model")
        if kind != "model":
            raise ModelLoadError(f"{path} does not hold a model: its general.type is {kind!r:.80}")
        architecture = self.text("general.architecture", "")
        if not architecture:
            raise ModelLoadError(f"{path} has no general.architecture, so rustvllm cannot know which model it holds")
        self.architecture = architecture

    def refuse_unread_types(self) -> None:
        """Refuse a file some of whose tensors have a type that is not read.

        Raises:
            ModelLoadError: Names the types, some tensors, and what is read.
        """
        unread = [(name, kind) for name, kind, *_ in self.header.tensors() if kind not in SERVED_TYPES]
        if unread:
            kinds = ", ".join(sorted({kind for _, kind in unread}))
            names = ", ".join(name for name, _ in unread[:_MAX_NAMED])
            raise ModelLoadError(
                f"{self.path}: {len(unread)} tensors ({names}, …) have the type {kinds}, which is not supported; "
                f"supported: {', '.join(SERVED_TYPES)}. Use a Q4_K_M, Q5_K_M, Q6_K or Q8_0 file of this model"
            )

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number of the metadata.

        Raises:
            ModelLoadError: It is something else.
        """
        value = self.header.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number", value)
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number of the metadata; of a list with one for each layer, the one that all of them are.

        Raises:
            ModelLoadError: It is something else, or layers differ.
        """
        value = self.header.get(key)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise ModelLoadError(
                    f"{self.path}: {key} differs between layers ({str(value)[:80]}), which is not supported"
                )
            value = value[0]
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number", value)
        return value

    def text(self, key: str, default: str) -> str:
        """A text of the metadata.

        Raises:
            ModelLoadError: It is something else.
        """
        value = self.header.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a text", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A yes or no of the metadata.

        Raises:
            ModelLoadError: It is something else.
        """
        value = self.header.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of the metadata whose elements are of one kind; empty when it is not there.

        Raises:
            ModelLoadError: It is something else.
        """
        value = self.header.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise self.wrong(key, f"a list of {_PLURALS[kind]}", value)
        return value

    def numbers_of(self, name: str) -> list[float] | None:
        """The numbers of a small tensor of F32; None when there is none of that name.

        Raises:
            ModelLoadError: It is of another type, too large, or cannot be read.
        """
        import numpy as np

        for known, kind, shape, file, offset, nbytes in self.header.tensors():
            if known != name:
                continue
            if kind != "F32" or len(shape) != 1 or nbytes > 1 << 16:
                raise ModelLoadError(
                    f"{self.path}: the tensor {name!r} must be a short vector of F32, not {kind} of shape {shape}"
                )
            try:
                with self.header.paths[file].open("rb") as opened:
                    opened.seek(offset)
                    return [float(x) for x in np.frombuffer(opened.read(nbytes), "<f4")]
            except OSError as error:
                raise ModelLoadError(f"cannot read {self.path}: {error.strerror}") from error
        return None

    def wrong(self, key: str, expected: str, value: object) -> ModelLoadError:
        """What to say of a value of another kind."""
        return ModelLoadError(f"{self.path}: {key} must be {expected}, got {value!r:.80}")
