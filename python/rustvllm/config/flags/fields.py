"""Flags of the command line, made from the fields of a dataclass."""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any, Final

from rustvllm.config.flags.refused import add_refused_arguments, flag_names

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_NUMBER = re.compile(r"(-?[0-9]+)(?:\.([0-9]+))?([kmgKMG]?)")


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
        dashed, *underscored = flag_names(field.name)
        options.update(dest=field.name, default=argparse.SUPPRESS)
        group.add_argument(dashed, help=help_text.replace("%", "%%"), **options)
        for flag in underscored:
            group.add_argument(flag, help=argparse.SUPPRESS, **options)
    add_refused_arguments(parser)
    return parser


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
