"""Flags of the command line, made from the fields of a dataclass; those of features to come are refused by name."""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rustvllm.exceptions import ConfigError

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_NUMBER = re.compile(r"(-?[0-9]+)(?:\.([0-9]+))?([kmgKMG]?)")

NOT_SUPPORTED_YET: Final[Mapping[str, tuple[Any, ...]]] = {
    # argument -> values that ask for nothing and are let through
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "uni"),
    "enable_lora": (False,),
    "structured_outputs_config": (None,),
    "guided_decoding_backend": (None, "auto"),
    "enable_prompt_embeds": (False,),
    "rope_scaling": (None,),
    "cpu_offload_gb": (0, 0.0),
    "kv_offloading_size": (None, 0),
    "stream_interval": (1,),
    "performance_mode": (None, "balanced"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "code_revision": (None,),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "limit_mm_per_prompt": (None,),
    "compilation_config": (None,),
    "disable_log_requests": (True,),
    "enable_log_requests": (False,),
    "disable_sliding_window": (False,),
}


_ONE_DEVICE = "one device computes a model; -dp N starts N engines with the whole model each"
_REASONS: Final[Mapping[str, str]] = {
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": "one engine runs in this process; rustvllm serve -dp N starts N",
    "distributed_executor_backend": _ONE_DEVICE,
    "enable_lora": "adapters are not served; merge one into the checkpoint and serve that",
    "structured_outputs_config": "one backend enforces structured output, and needs no settings",
    "guided_decoding_backend": "one backend enforces structured output",
    "enable_prompt_embeds": "prompts are texts or token ids",
    "rope_scaling": 'hf_overrides takes it: {"rope_scaling": ...}',
    "cpu_offload_gb": "weights are not offloaded; quantization int8 or dtype bfloat16 makes them smaller",
    "kv_offloading_size": "KV blocks stay with their engine; preemption_mode swap moves them to CPU memory",
    "stream_interval": "a stream sends each token, and what a slow reader left behind is joined",
    "performance_mode": "max_num_seqs and max_num_batched_tokens choose between latency and throughput",
    "tokenizer_mode": "tokenizers run in the core, one way",
    "tokenizer_revision": "name a folder as the tokenizer, or one revision for model and tokenizer",
    "code_revision": "one revision holds for the model and its code",
    "runner": "only text is generated",
    "task": "only text is generated",
    "limit_mm_per_prompt": "messages hold text alone",
    "compilation_config": "models run as they are written; cudagraph_capture_sizes names the sizes of CUDA graphs",
    "disable_log_requests": "requests are logged with enable_log_requests alone, which the server has",
    "enable_log_requests": "the server has it; a script sees its requests itself",
    "disable_sliding_window": "a model's sliding window is part of it; a lower max_model_len keeps within it",
}
"""Why an argument does not work, and what does."""


def arg(help_text: str, default: Any = None, **options: Any) -> Any:
    """Declare a dataclass field together with its help text and other options of its flag."""
    return dataclasses.field(default=default, metadata={"help": help_text, **options})


def parse_number(text: str) -> int:
    """An integer, with ``k`` for thousands and ``K`` for 1024 (and m, M, g, G): ``4096``, ``8K``, ``1.5k``.

    Raises:
        argparse.ArgumentTypeError: Not a number of that form.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match and len(text) < 32:
        whole, decimals, unit = match.groups()
        digits = decimals or ""
        scaled, rest = divmod(int(whole + digits) * _UNITS[unit], int("1" + "0" * len(digits)))
        if rest == 0:
            return scaled
    raise argparse.ArgumentTypeError(f"must be a whole number such as 4096, 8K or 1.5k, got {text!r}")


def parse_max_model_len(text: str) -> int | str:
    """A number as :func:`parse_number` has it, or ``auto``, which ``-1`` means too.

    Raises:
        argparse.ArgumentTypeError: Neither.
    """
    return "auto" if text.strip() in ("auto", "-1") else parse_number(text)


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        argparse.ArgumentTypeError: Not one.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def add_flags(parser: argparse.ArgumentParser, fields: Iterable[dataclasses.Field[Any]]) -> argparse.ArgumentParser:
    """Add a flag for every argument; ``-`` and ``_`` mean the same, switches also have a ``--no-`` form."""
    groups: dict[str, Any] = {}
    for field in fields:
        options = dict(field.metadata)
        name, help_text = options.pop("group"), options.pop("help")
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        if isinstance(field.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        if field.default is not None:
            help_text += f" (default: {_shown(field.default)})"
        # Not given is not the same as given with the default: a positional MODEL wins over --model with a warning.
        dashed, *underscored = _flags(field.name)
        options.update(dest=field.name, default=argparse.SUPPRESS)
        group.add_argument(dashed, help=help_text.replace("%", "%%"), **options)
        for flag in underscored:
            group.add_argument(flag, help=argparse.SUPPRESS, **options)
    taken = parser._option_string_actions  # noqa: SLF001 -- argparse has no public way to ask
    for name in NOT_SUPPORTED_YET:
        flags = [flag for flag in _flags(name) if flag not in taken]
        if not flags:  # the caller has an argument of that name; without a flag this would be a positional one
            continue
        hidden: Any = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*flags, nargs="*", action=_NotSupportedYet, **hidden)
        off = [flag.replace("--", "--no-", 1) for flag in flags]
        off = [flag for flag in off if flag not in taken]
        if off:
            parser.add_argument(*off, nargs=0, action=_SwitchedOff, **hidden)
    return parser


def check_supported(name: str, value: Any) -> None:
    """Refuse an argument of a feature to come, unless its value asks for nothing.

    Raises:
        ConfigError: Names argument and value.
    """
    neutral = NOT_SUPPORTED_YET[name]
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in neutral):
        raise ConfigError(f"{name}={value!r} is not supported yet: {_REASONS[name]}")


def with_flag_names(message: str, names: Iterable[str]) -> str:
    """A message about arguments with the flags of the command line: ``max_model_len is`` is ``--max-model-len is``."""
    for name in names:
        # A plain word such as `device` is an argument where the message begins with it.
        pattern = rf"(?<![\w'\"-]){name}(?!\w)" if "_" in name else rf"^{name}(?=[ =])"
        message = re.sub(pattern, f"--{name.replace('_', '-')}", message)
    return message


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _flags(name: str) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag, "--" + name] if "_" in name else [flag]


class _NotSupportedYet(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 -- argparse's signature
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = [str(value) for value in values]
        neutral = [str(value) for value in NOT_SUPPORTED_YET[self.dest]]
        if (given or ["True"]) not in [[value] for value in neutral]:  # a bare flag is a switch
            shown = " ".join([str(option_string), *given])
            parser.error(f"{shown} is not supported yet: {_REASONS[self.dest]}")


class _SwitchedOff(argparse.Action):
    """``--no-…`` of a feature to come: that is how things are."""

    def __call__(self, *_: object) -> None:
        return
