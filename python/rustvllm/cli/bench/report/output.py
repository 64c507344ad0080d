"""Where a report goes: to standard output, and into a file if one is named."""

import argparse
import json
from pathlib import Path
from typing import Any

from rustvllm.exceptions import ConfigError


def check_output(path: str | None) -> None:
    """Refuse an ``--output-json`` that cannot be written; None: there is none.

    Raises:
        ConfigError: Names the file and the reason.
    """
    if path is not None:
        check_writable(path, "--output-json")


def check_writable(path: str, what: str) -> None:
    """Refuse a file that cannot be written before hours are spent on what should be in it.

    What is there stays, and what is not there is not there afterwards: an interrupted run leaves no empty file behind.

    Args:
        path: Of the file.
        what: Stands before it in the message.

    Raises:
        ConfigError: Names the file and the reason.
    """
    file = Path(path)
    try:
        is_new = not file.exists()
        with file.open("a", encoding="utf-8"):
            pass
        if is_new and not file.is_symlink():
            file.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {what} {path}: {error.strerror}") from error


def publish(args: argparse.Namespace, report: dict[str, Any], summary: str) -> None:
    """Print the report, for people or with ``--json``, and write it into ``--output-json``.

    Raises:
        ConfigError: It cannot be written.
    """
    text = json.dumps(report, indent=2)
    print(text if args.json else summary)
    if args.output_json is not None:
        try:
            Path(args.output_json).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write --output-json {args.output_json}: {error.strerror}") from error
