"""``--config FILE``: the flags of a YAML file, as the words of a command line.

A key is a flag without its dashes, ``-`` or ``_`` in it; what the command line says itself wins. Scalars are taken as
they are written, so that a revision of ``1.10`` stays one; only booleans and null are read as such.
"""

import argparse
import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rustvllm.exceptions import ConfigError

FLAG = "--config"
_LARGEST_FILE = 1 << 20
_NULL, _BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"


def expand_config(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """``argv`` with the flags of its configuration file in front, those left out that it has itself.

    Args:
        parser: Knows all flags; ``-`` stands between their words.
        argv: Words of the command line, flags with ``-`` between words.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, or has a key or a value that no flag takes.
    """
    words = list(argv)
    path = _take_path(words)
    if path is None:
        return words
    actions = {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001 -- no other way
    given = {actions[flag].dest for flag in _flags(words) if flag in actions}
    if any(not word.startswith("-") for word in words[:1]):
        given.add("model")
    from_file: list[str] = []
    seen: set[str] = set()
    for key, value in _read(path):
        name = key.replace("_", "-")
        if name in seen:
            raise ConfigError(f"{FLAG} {path}: {key!r} appears twice")
        seen.add(name)
        from_file += _words(path, key, value, actions, given)
    # A positional model stays in front: a flag that takes several words would take it too.
    return words[:1] + from_file + words[1:] if words and not words[0].startswith("-") else from_file + words


def _take_path(words: list[str]) -> str | None:
    """Remove the flag and its value from ``words``."""
    places = [index for index, flag in enumerate(words) if flag == FLAG or flag.startswith(f"{FLAG}=")]
    if not places:
        return None
    if len(places) > 1:
        raise ConfigError(f"{FLAG} is given {len(places)} times; put all flags into one file")
    (place,) = places
    flag, equals, path = words.pop(place).partition("=")
    if not equals:
        if place >= len(words) or words[place].startswith("--"):
            raise ConfigError(f"{flag} needs the name of a YAML file")
        path = words.pop(place)
    return path


def _flags(words: Sequence[str]) -> Iterator[str]:
    return (word.partition("=")[0] for word in words if word.startswith("-"))


def _read(path: str) -> list[tuple[str, Any]]:
    """Keys and YAML nodes of the file, in its order."""
    import yaml

    try:
        file = Path(path).expanduser()
        if file.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"{FLAG} {path} has {file.stat().st_size} bytes; the limit is {_LARGEST_FILE}")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {FLAG} {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{FLAG} {path} is not valid YAML: {error}") from error
    if root is None or root.tag == _NULL:  # empty, or comments alone
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{FLAG} {path} must be a mapping of flags to values, such as 'port: 8000'")
    return [(str(key.value) if isinstance(key, yaml.ScalarNode) else "", value) for key, value in root.value]


def _words(path: str, key: str, node: Any, actions: dict[str, argparse.Action], given: set[str]) -> list[str]:
    """The words of one entry; none when the command line, or an entry before, has said it."""
    flag = "--" + key.strip().lstrip("-").replace("_", "-")
    if flag in ("--model", "--model-tag"):
        flag = "--model"
    action = actions.get(flag)
    if action is None or flag in (FLAG, "--help"):
        raise ConfigError(f"{FLAG} {path}: there is no flag for {key!r}{_hint(flag, actions)}")
    if action.dest in given:
        return []
    where = f"{FLAG} {path}: {key}"
    if (texts := _texts(where, node)) is None:
        return []
    if action.nargs == 0:
        return _switch(where, flag, texts, actions)
    if isinstance(texts, bool):
        if action.help is argparse.SUPPRESS:  # of a feature to come: the flag itself says so
            return [flag] if texts else []
        raise ConfigError(f"{where} takes a value, got {str(texts).lower()}")
    if isinstance(texts, str):
        return [f"{flag}={texts}"]
    if isinstance(action, argparse._AppendAction) and action.nargs is None:  # noqa: SLF001 -- no other way
        return [f"{flag}={text}" for text in texts]
    if action.nargs not in ("+", "*"):
        raise ConfigError(f"{where} takes one value, got a list of {len(texts)}")
    if action.nargs == "+" and not texts:
        raise ConfigError(f"{where} needs at least one value, got an empty list")
    if len(texts) == 1:
        return [f"{flag}={texts[0]}"]
    if wrong := next((text for text in texts if text.startswith("-")), None):
        raise ConfigError(f"{where}: in a list of several values, none may begin with '-', got {wrong!r}")
    return [flag, *texts] if texts else [f"{flag}=[]"]


def _switch(where: str, flag: str, value: Any, actions: dict[str, argparse.Action]) -> list[str]:
    """Words of a flag without a value."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is a switch: it must be true or false, got {value!r}")
    if value:
        return [flag]
    off = flag.replace("--", "--no-", 1)
    return [off] if off in actions else []  # without one it is off by itself


def _texts(where: str, node: Any) -> str | bool | list[str] | None:
    """A value as text; a mapping as JSON; a list as texts."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return str(node.value).lower() in ("true", "yes", "on")
        return str(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_item(where, item) for item in node.value]
    return _json(where, node)


def _item(where: str, node: Any) -> str:
    import yaml

    if isinstance(node, yaml.ScalarNode) and node.tag != _NULL:
        return str(node.value)
    if isinstance(node, yaml.MappingNode):
        return _json(where, node)
    raise ConfigError(f"{where}: a list may contain strings, numbers and objects, but not lists or null")


def _json(where: str, node: Any) -> str:
    import yaml

    loader = yaml.SafeLoader("")
    try:
        return json.dumps(loader.construct_document(node), allow_nan=False)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be written as JSON: {error}") from error
    finally:
        loader.dispose()


def _hint(flag: str, actions: dict[str, argparse.Action]) -> str:
    visible = [name for name, action in actions.items() if action.help is not argparse.SUPPRESS]
    near = difflib.get_close_matches(flag, visible, n=1)
    return f"; did you mean {near[0].lstrip('-')!r}?" if near else ""
