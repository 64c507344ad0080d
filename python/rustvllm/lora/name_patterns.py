"""``NamePatterns``: which of a model's modules the expressions of an adapter's ``adapter_config.json`` match.

An expression comes with an adapter, and adapters come from anywhere: one with nested repetitions takes for ever, and
Python's ``re`` lets no other thread run meanwhile. So only what is a plain name is compared here; everything else is
matched in a process of its own, with little processor time and memory.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from rustvllm.exceptions import ModelLoadError

MAX_EXPRESSIONS: Final = 256
"""Expressions of one adapter that are not plain names."""
CPU_SECONDS: Final = 2
"""For all expressions of one adapter."""
MEMORY_BYTES: Final = 512 << 20
WALL_SECONDS: Final = 30.0
"""For the same on a machine that is busy otherwise."""
_PLAIN: Final = re.compile(r"[\w-]+(?:\\?\.[\w-]+)*")
_PROGRAM: Final = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
asked = json.load(sys.stdin)
found = [[name for name in asked["names"] if re.fullmatch(each, name)] for each in asked["expressions"]]
print(json.dumps(found))
"""

Value = TypeVar("Value")


class NamePatterns:
    """The matches of some expressions.

    Args:
        adapter: Its name, for messages.
        ends: Expressions for a module's name, or its end from a dot on.
        wholes: Expressions for a module's whole name.
        modules: Names of modules; others match nothing.

    Raises:
        ModelLoadError: There are too many expressions, or they take too long.
    """

    def __init__(self, adapter: str, ends: Iterable[str], wholes: Iterable[str], modules: Collection[str]) -> None:
        expressions = [_at_end(each) for each in ends if not _is_plain(each)]
        expressions += [each for each in wholes if not _is_plain(each)]
        self._found = dict(zip(expressions, _matches(adapter, expressions, modules), strict=True))

    def has_whole(self, expression: str, module: str) -> bool:
        """Whether one of ``wholes`` matches a module."""
        return _text(expression) == module if _is_plain(expression) else module in self._found[expression]

    def first(self, values: Mapping[str, Value], module: str, default: Value) -> Value:
        """The value of the first of ``ends`` that matches a module.

        Args:
            values: By expression, in their order.
            module: Its name.
            default: The value without a match.
        """
        for expression, value in values.items():
            if _is_plain(expression):
                is_found = f".{module}".endswith(f".{_text(expression)}")
            else:
                is_found = module in self._found[_at_end(expression)]
            if is_found:
                return value
        return default


def check_expression(expression: str) -> None:
    """Compile an expression as a whole name and as an end of one.

    Raises:
        ValueError: It is not valid; so is an ``OverflowError`` or a ``RecursionError``.
    """
    try:
        re.compile(expression)
        re.compile(_at_end(expression))
    except re.error as error:
        raise ValueError(str(error)) from error


def _at_end(expression: str) -> str:
    return rf"(.*\.)?({expression})"


def _is_plain(expression: str) -> bool:
    return _PLAIN.fullmatch(expression) is not None


def _text(expression: str) -> str:
    return expression.replace("\\", "")


def _matches(adapter: str, expressions: Sequence[str], modules: Collection[str]) -> list[frozenset[str]]:
    """The modules that each expression matches."""
    if not expressions:
        return []
    if len(expressions) > MAX_EXPRESSIONS:
        raise ModelLoadError(
            f"adapter {adapter!r}: adapter_config.json has {len(expressions)} regular expressions, but the limit is "
            f"{MAX_EXPRESSIONS}; plain names of modules do not count"
        )
    asked = json.dumps({"expressions": expressions, "names": list(modules)})
    status, answer = -int(signal.SIGXCPU), b""
    try:
        done = subprocess.run(  # noqa: S603 -- the program is a constant; expressions are its input
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=asked.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WALL_SECONDS,
            check=False,
            start_new_session=True,  # a Ctrl-C of the terminal is for the server
        )
        status, answer = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        pass  # the same as too much processor time
    except OSError as error:
        raise ModelLoadError(
            f"adapter {adapter!r}: no process can be started to match the regular expressions of adapter_config.json: "
            f"{error.strerror}"
        ) from error
    if status:
        raise ModelLoadError(
            f"adapter {adapter!r}: the regular expressions of adapter_config.json exceed the limit of {CPU_SECONDS} "
            f"seconds and {MEMORY_BYTES >> 20} MiB to match {len(modules)} names of modules; list the names instead, "
            "or leave out nested repetitions"
        )
    return [frozenset(found) for found in json.loads(answer)]
