#!/usr/bin/env python3
"""Writes docs/flags.md: every flag of `rustvllm serve` by group, and every environment variable.

python scripts/flags_doc.py            # write it
python scripts/flags_doc.py --check    # fail when it is not what would be written
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "flags.md"
VARIABLES = REPOSITORY / "python" / "rustvllm" / "envs.py"

HEAD = """\
# Flags and environment variables

Written by `scripts/flags_doc.py` from the program's own declarations; do not edit it by hand.

`rustvllm serve [MODEL] [flags]`. In a flag `-` and `_` mean the same; a switch that has a `--no-` form is listed with
it. `rustvllm serve --help` lists the groups, `--help=GROUP` explains the flags of one, `--help=WORD` those with a word
in them, `--help=all` all.

A file given with `--config` holds the same flags as keys of a YAML mapping ([operations.md](operations.md)).
"""

REFUSED = """
## Known and refused

Flags of vLLM whose features are not built. Each is refused with its reason, except with a value that turns the feature
off, such as `--ubatch-size 0`.

| flags | why, and what works |
|---|---|
"""

WITHOUT_EFFECT = """
## Known and without effect

Flags of vLLM that would change nothing here. They are accepted with any value.

| flags | why |
|---|---|
"""

ENVIRONMENT = """
## Environment variables

A flag takes precedence over the variable with the same meaning.

| variable | meaning |
|---|---|
"""


def render() -> str:
    """The whole page."""
    from rustvllm.cli.grouped_help import groups
    from rustvllm.cli.serve import make_parser
    from rustvllm.config.flags import refused

    parser = make_parser()
    page = [HEAD]
    for title, actions in groups(parser):
        page.append(f"\n## {title}\n\n| flag | meaning |\n|---|---|\n")
        page += [f"| {_flag(action)} | {_cell(_help(parser, action))} |\n" for action in actions]
    page += [
        REFUSED,
        *_argument_rows(parser),
        *_rows(refused.REFUSED),
        WITHOUT_EFFECT,
        *_rows(refused.WITHOUT_EFFECT),
    ]
    page += [ENVIRONMENT, *(f"| `{name}` | {_cell(text)} |\n" for name, text in _variables())]
    return "".join(page)


def _flag(action: argparse.Action) -> str:
    names = " ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    value = action.metavar or (action.dest.upper() if action.choices is None else "|".join(map(str, action.choices)))
    more = " …" if action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction) else ""  # noqa: SLF001
    return f"{names} {_cell(f'{value}{more}')}"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action)  # noqa: SLF001 -- argparse fills in defaults here alone


def _rows(table: Mapping[str, str]) -> Iterator[str]:
    """A row for each reason, with its flags."""
    for reason, flags in table.items():
        names = ", ".join(f"`{word.partition('=')[0].partition(',')[0]}`" for word in flags.split())
        yield f"| {names} | {_cell(reason)} |\n"


def _argument_rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A row for each reason, with the flags of its engine arguments that are not flags of the server."""
    from rustvllm.config.flags.refused import REFUSED_ARGUMENTS, flag_names, rows

    of_reason: dict[str, list[str]] = {}
    for [name], _, reason in rows(REFUSED_ARGUMENTS):
        flag = flag_names(name)[0]
        if parser._option_string_actions[flag].help is argparse.SUPPRESS:  # noqa: SLF001
            of_reason.setdefault(reason, []).append(f"`{flag}`")
    yield from (f"| {', '.join(flags)} | {_cell(reason)} |\n" for reason, flags in of_reason.items())


def _variables() -> list[tuple[str, str]]:
    """Names and meanings, from the first lines of the functions that read them."""
    found = []
    for node in ast.parse(VARIABLES.read_text(encoding="utf-8")).body:
        text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if text and (named := re.match(r"``([A-Z_]+)(?:=(\w+))?``: (.+)", text, re.DOTALL)):
            name, value, meaning = named.groups()
            meaning = " ".join(meaning.split()).replace("``", "`")
            found.append((f"{name}={value}" if value else name, meaning))
    found.append(("RUSTVLLM_API_KEY", "API keys, separated by spaces, one of which clients must send (default: none)"))
    return sorted(found)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(description="Writes docs/flags.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when the page is not current")
    args = parser.parse_args()
    page = render()
    if not args.check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print("docs/flags.md is not current: run python scripts/flags_doc.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
