"""``--help`` of a command with many flags: a list of their groups, one group, or all flags with a word in them."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

ALL = "all"


class GroupedHelp(argparse.Action):
    """``--help``, ``--help=all``, ``--help=GROUP`` and ``--help=WORD``; prints and ends, with 2 without a match."""

    def __init__(self, option_strings: Sequence[str], dest: str = argparse.SUPPRESS, **kwargs: Any) -> None:
        kwargs.update(nargs="?", metavar="WHAT", help="all flags, those of a group, or those with a word in them")
        super().__init__(option_strings, dest, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 -- argparse's signature
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        what = str(values or "").strip()
        if not what:
            print(overview(parser), end="")
        elif what == ALL:
            parser.print_help()
        elif (text := selection(parser, what)) is not None:
            print(text, end="")
        else:
            names = ", ".join(name for name, _ in groups(parser))
            parser.error(f"no flag or group matches {what!r}; the groups are {names}")
        parser.exit()


def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Titles of the groups that have flags to show, with these."""
    for group in parser._action_groups:  # noqa: SLF001 -- argparse has no public way to ask
        actions = [
            action
            for action in group._group_actions  # noqa: SLF001
            if action.option_strings and action.help is not argparse.SUPPRESS and not isinstance(action, GroupedHelp)
        ]
        if actions:
            yield str(group.title), actions


def overview(parser: argparse.ArgumentParser) -> str:
    """Usage, and the groups with the flags that each has."""
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)  # noqa: SLF001
    formatter.add_text(parser.description)
    formatter.start_section("arguments")
    formatter.add_arguments([action for action in parser._actions if not action.option_strings])  # noqa: SLF001
    formatter.end_section()
    lines = [formatter.format_help(), "flags by group:"]
    for title, actions in groups(parser):
        lines += [f"  {title}", *_wrapped(" ".join(action.option_strings[0] for action in actions))]
    lines += [
        "",
        f"  {parser.prog} --help=all      every flag with its meaning",
        f"  {parser.prog} --help=GROUP    the flags of a group, such as --help=scheduler",
        f"  {parser.prog} --help=WORD     the flags with that word in them, such as --help=max-model-len",
        "",
    ]
    return "\n".join(lines)


def selection(parser: argparse.ArgumentParser, what: str) -> str | None:
    """The flags of the group of that title, else the flag of that name, else those with the word, else None."""
    title = what.lower().replace("_", "-")
    word = title.lstrip("-")
    found = {name: actions for name, actions in groups(parser) if name.lower() == title}
    if not found:
        found = _filtered(parser, lambda flags, _: f"--{word}" in flags)
    if not found:
        found = _filtered(parser, lambda flags, text: any(word in flag for flag in flags) or word in text.lower())
    if not found:
        return None
    formatter = parser.formatter_class(prog=parser.prog)
    for name, actions in found.items():
        formatter.start_section(name)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _filtered(parser: argparse.ArgumentParser, matches: Any) -> dict[str, list[argparse.Action]]:
    found = {}
    for name, actions in groups(parser):
        if chosen := [action for action in actions if matches(action.option_strings, action.help or "")]:
            found[name] = chosen
    return found


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
