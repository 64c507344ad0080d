"""``adapter_config.json`` of peft: which modules an adapter changes, at which rank and scale; what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rustvllm.exceptions import ModelLoadError
from rustvllm.lora.name_patterns import NamePatterns, check_expression

MAX_CONFIG_BYTES: Final = 4 << 20
MAX_PATTERN_CHARACTERS: Final = 2000
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    # key -> values that ask for nothing besides the two matrices
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "megatron_config": (None,),
}
_CHANGES_THE_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that leave a part of the weights in the base, which is then not the base that is served."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What of the file counts.

    Attributes:
        rank: Of modules that no pattern names.
        alpha: Likewise.
        uses_rslora: Whether the scale is ``alpha / sqrt(rank)`` in place of ``alpha / rank``.
        uses_dora: Whether each output of an adapted weight has a length of its own (a magnitude).
        rank_pattern: End of a module's name, as an expression → its rank.
        alpha_pattern: The same for alpha.
        target_modules: Ends of names, or an expression for the whole name.
        exclude_modules: Likewise, for those that are left out.
        is_partial: Whether further keys choose among the layers, so that not every named module is adapted.
        base_model: Name of the model that it was made for, or "".
    """

    rank: int
    alpha: float
    uses_rslora: bool
    uses_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    is_partial: bool
    base_model: str

    def for_modules(self, adapter: str, modules: Collection[str]) -> ModuleSettings:
        """The same for the modules of a model.

        Args:
            adapter: Its name, for messages.
            modules: Their names, as the adapter has them and as the model does.

        Raises:
            ModelLoadError: Expressions take too long to match.
        """
        wholes = [each for each in (self.target_modules, self.exclude_modules) if isinstance(each, str)]
        patterns = NamePatterns(adapter, [*self.rank_pattern, *self.alpha_pattern], wholes, modules)
        return ModuleSettings(self, patterns)


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """What the file says of each module of a model.

    Attributes:
        config: The file.
        patterns: The matches of its expressions.
    """

    config: PeftConfig
    patterns: NamePatterns

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return self.patterns.first(self.config.rank_pattern, module, self.config.rank)

    def scale_of(self, module: str) -> float:
        """The factor on a module's product of matrices."""
        rank, alpha = self.rank_of(module), self.patterns.first(self.config.alpha_pattern, module, self.config.alpha)
        return alpha / math.sqrt(rank) if self.config.uses_rslora else alpha / rank

    def targets(self, modules: Iterable[str]) -> list[str]:
        """Those of a model's modules that the file names, so that their matrices must be there."""
        config = self.config
        if config.is_partial:
            return []
        return [
            name
            for name in modules
            if self._names(config.target_modules, name) and not self._names(config.exclude_modules, name)
        ]

    def _names(self, wanted: tuple[str, ...] | str, module: str) -> bool:
        """Whether a list of ends, or an expression for the whole name, names a module of the model's blocks."""
        if isinstance(wanted, str):
            return wanted == "all-linear" or self.patterns.has_whole(wanted, module)
        return any(module == end or module.endswith(f".{end}") for end in wanted)


def read_peft_config(path: Path, name: str, max_rank: int) -> PeftConfig:
    """Read the file, and refuse what is not served.

    Args:
        path: Of the file.
        name: The adapter's, for messages.
        max_rank: Largest rank that is served.

    Raises:
        ModelLoadError: Not such a file, or it asks for what is not served; the message names the key.
    """
    data = _read(path, name)
    kind = data.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelLoadError(f"adapter {name!r}: peft_type is {kind!r:.60}, but rustvllm only supports LORA")
    for key, neutral in _NEUTRAL.items():
        if data.get(key) not in neutral:
            raise ModelLoadError(
                f"adapter {name!r}: {key} is {data[key]!r:.100} in {path.name}, which is not supported; merge the "
                "adapter into the checkpoint, or train it without that option"
            )
    start = data.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise ModelLoadError(
            f"adapter {name!r}: init_lora_weights is {start!r:.60}, which stores a part of the adapter in the base "
            "model; convert it with peft's path_initial_model_for_weight_conversion"
        )
    rank, alpha = data.get("r"), data.get("lora_alpha", 8)
    return PeftConfig(
        rank=_rank(rank, "r", name, max_rank),
        alpha=_number(alpha, "lora_alpha", name),
        uses_rslora=_flag(data, "use_rslora", name),
        uses_dora=_flag(data, "use_dora", name),
        rank_pattern={
            key: _rank(value, f"rank_pattern of {key}", name, max_rank)
            for key, value in _patterns(data, "rank_pattern", name).items()
        },
        alpha_pattern={
            key: _number(value, f"alpha_pattern of {key}", name)
            for key, value in _patterns(data, "alpha_pattern", name).items()
        },
        target_modules=_modules(data, "target_modules", name),
        exclude_modules=_modules(data, "exclude_modules", name),
        is_partial=data.get("layers_to_transform") is not None or data.get("target_modules") is None,
        base_model=str(data.get("base_model_name_or_path") or ""),
    )


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"adapter {name!r}: {path} has {size} bytes; the limit is {MAX_CONFIG_BYTES}")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"adapter {name!r}: {path} cannot be read: {error!r:.300}") from error
    if not isinstance(data, dict):
        raise ModelLoadError(f"adapter {name!r}: {path} must hold an object, got {data!r:.80}")
    return data


def _rank(value: object, key: str, name: str, max_rank: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"adapter {name!r}: {key} must be a whole number of at least 1, got {value!r:.60}")
    if value > max_rank:
        raise ModelLoadError(
            f"adapter {name!r}: its LoRA rank {value} ({key}) is greater than max_lora_rank {max_rank}: raise "
            "max_lora_rank (--max-lora-rank)"
        )
    return value


def _number(value: object, key: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelLoadError(f"adapter {name!r}: {key} must be a number, got {value!r:.60}")
    return float(value)


def _flag(data: Mapping[str, Any], key: str, name: str) -> bool:
    value = data.get(key)
    if value not in (None, False, True):
        raise ModelLoadError(f"adapter {name!r}: {key} must be true or false, got {value!r:.60}")
    return bool(value)


def _patterns(data: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    found = data.get(key) or {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"adapter {name!r}: {key} must be an object, got {found!r:.80}")
    for pattern in found:
        _check_expression(pattern, key, name)
    return found


def _modules(data: Mapping[str, Any], key: str, name: str) -> tuple[str, ...] | str:
    found = data.get(key)
    if found is None:
        return ()
    if isinstance(found, str):
        if found != "all-linear":
            _check_expression(found, key, name)
        return found
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ModelLoadError(
            f"adapter {name!r}: {key} must be a list of names or a regular expression, got {found!r:.80}"
        )
    return tuple(found)


def _check_expression(pattern: str, key: str, name: str) -> None:
    try:
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise ValueError(f"it has {len(pattern)} characters; the limit is {MAX_PATTERN_CHARACTERS}")
        check_expression(pattern)
    except (ValueError, RecursionError, OverflowError) as error:
        raise ModelLoadError(
            f"adapter {name!r}: {key} has an invalid regular expression: {pattern!r:.100}: {error}"
        ) from error
