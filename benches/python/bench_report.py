"""``new_report`` and ``publish``: begin and write the report of every script in this folder."""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from rustvllm.cli.bench.report.machine import machine, require_release_build, versions


def new_report() -> dict[str, Any]:
    """Begin a report with date, command, machine, versions and the machine's other load; refuses a debug build."""
    require_release_build()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv),
        "machine": machine(),
        "versions": versions(),
        "load_average": os.getloadavg(),
    }


def publish(report: dict[str, Any], path: Path | None) -> None:
    """Print the report as JSON, and write it to a file if one is given."""
    text = json.dumps(report, indent=2)
    if path is not None:
        path.write_text(text + "\n")
    print(text, flush=True)


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every script has."""
    parser.add_argument("--mode", choices=["process", "thread"], default="process", help="of rustvllm's engine")
    parser.add_argument("--output-json", type=Path, help="write the report there as well")


def add_server_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--server``, for scripts that also measure another server, such as that of an older commit."""
    parser.add_argument(
        "--server",
        type=shlex.split,
        metavar="COMMAND",
        help="what starts the server, as a shell would take it; takes the flags of rustvllm serve (default: this one)",
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the flags; arguments after ``--`` are for ``rustvllm serve`` and become ``serve``."""
    own, serve = sys.argv[1:], []
    if "--" in own:
        place = own.index("--")
        own, serve = own[:place], own[place + 1 :]
    args = parser.parse_args(own)
    args.serve = serve
    return args


def numbers(text: str) -> list[float]:
    """Numbers that are separated by commas."""
    return [float(part) for part in text.split(",")]


def whole_numbers(text: str) -> list[int]:
    """Integers that are separated by commas."""
    return [int(part) for part in text.split(",")]
