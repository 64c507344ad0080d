"""The argument parser of the command line.

``-`` and ``_`` mean the same in a flag, and a misspelt flag names its nearest neighbour.
"""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from rustvllm.redaction import MASK, redact, redact_mapping


class FlexibleArgumentParser(argparse.ArgumentParser):
    """``--max_model_len`` is ``--max-model-len``; abbreviations are not guessed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, with ``_`` in flags read as ``-``."""
        import sys

        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([with_dashes(arg) for arg in given], namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, which does not notice when standard output cannot be written."""
        import sys

        if message and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error over arguments that no flag takes."""
        first = unknown[0].partition("=")[0]
        hint = ""
        if first.startswith("-"):
            visible = [
                flag
                for action in self._actions
                for flag in action.option_strings
                if action.help is not argparse.SUPPRESS
            ]
            near = difflib.get_close_matches(first, visible, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
        # The value of a misspelt flag for a key is the key itself.
        is_secret = any(MASK in redact_mapping({name: "x"}).values() for name in (first, hint))
        shown = f"{first} {MASK}" if is_secret else redact(" ".join(unknown))
        self.error(f"unknown argument {shown}{hint}")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def with_dashes(arg: str) -> str:
    """A word of the command line, with ``-`` for ``_`` in the name of a flag."""
    if not arg.startswith("--") or "_" not in arg:
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value
