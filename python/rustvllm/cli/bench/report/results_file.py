"""``ResultsFile``: where ``rustvllm bench serve`` saves its report under vLLM's flags, one line of JSON per run."""

import json
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, BinaryIO, Final

from rustvllm.cli.bench.report.output import check_writable
from rustvllm.exceptions import ConfigError

_NOT_IN_NAMES: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters of a model's name that a file's name cannot or should not have; what is before the last slash goes too."""


class ResultsFile:
    """The file of ``--save-result`` or ``--append-result``; a new one unless a run is to be appended.

    Args:
        args: Parsed flags.
        model: What the server calls its model; part of the name that a file gets without ``--result-filename``.
        date: Likewise.

    Attributes:
        path: Of the file.
    """

    def __init__(self, args: Namespace, model: str, date: str) -> None:
        self._appends: bool = args.append_result
        self.path = Path(args.result_dir or "") / (args.result_filename or _usual_name(args, model, date))

    def check(self) -> None:
        """Make the folder, and refuse a file that cannot be written, before any load.

        Raises:
            ConfigError: Names the file and the reason.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {self.path.parent} of the results: {error.strerror}") from error
        check_writable(str(self.path), "the file of the results,")
        if self.path.exists() and not self._appends:
            raise ConfigError(
                f"the file of the results, {self.path}, exists already: give --append-result to add a line to it, or "
                "another --result-filename or --result-dir"
            )

    def write(self, report: dict[str, Any]) -> None:
        """Save the report: the only line of a new file, or one more.

        Raises:
            ConfigError: It cannot be written, or another run has made the file meanwhile.
        """
        line = json.dumps(report).encode() + b"\n"
        try:
            with self.path.open("a+b" if self._appends else "xb") as file:
                file.write(line if not self._appends or _is_at_line_start(file) else b"\n" + line)
        except OSError as error:
            raise ConfigError(f"cannot write the file of the results, {self.path}: {error.strerror}") from error


def _is_at_line_start(file: BinaryIO) -> bool:
    """Whether the end of a file is one; vLLM leaves its last line open."""
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _usual_name(args: Namespace, model: str, date: str) -> str:
    """As vLLM names it."""
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    model = _NOT_IN_NAMES.sub("_", model.rpartition("/")[2])
    label = args.label or args.backend
    return f"{label}-{args.request_rate}qps{concurrency}-{model}-{date}.json"
