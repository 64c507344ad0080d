"""Configurations as JSON and back, to send them to another process.

An unknown field is an error. Between the processes of one server the JSON needs no version. A front end may connect to
an engine of another release, which may have other fields; the error then names the first one.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

from rustvllm.config import EngineConfig
from rustvllm.exceptions import ConfigError

MAX_INFO_BYTES: Final = 64 << 10
"""Most bytes that an engine can send a client in the handshake."""

_Config = TypeVar("_Config")


def plain(config: Any) -> Any:
    """Turn a configuration into values that ``json.dumps`` accepts.

    Raises:
        ConfigError: It contains a class, which JSON cannot hold.
    """
    return _plain(config)


def build(kind: type[_Config], data: Any, name: str = "config") -> _Config:
    """Rebuild a configuration from what :func:`plain` returned.

    Args:
        kind: The dataclass of the configuration.
        data: The parsed JSON.
        name: Name of the configuration in messages.

    Raises:
        ConfigError: A field is unknown, a value has the wrong type, or a value is out of range.
    """
    config = _build(kind, data, name)
    assert isinstance(config, kind)
    return config


def dump_config(config: EngineConfig) -> str:
    """Serialise the configuration of an engine as JSON.

    Raises:
        ConfigError: It contains a class, which JSON cannot hold.
    """
    return json.dumps(_plain(config))


def load_config(text: str | bytes) -> EngineConfig:
    """Parse what :func:`dump_config` returned.

    Raises:
        ConfigError: The text is not the JSON of a configuration, or a value is out of range.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the engine's configuration is not JSON: {error}") from error
    return build(EngineConfig, data)


def dump_info(config: EngineConfig) -> bytes:
    """Serialise an engine's configuration for the handshake with a front end, without the model's ``config.json``.

    Raises:
        ConfigError: It is longer than ``MAX_INFO_BYTES``, or contains a class.
    """
    model = dataclasses.replace(config.model, hf_config={})
    info = dump_config(dataclasses.replace(config, model=model)).encode()
    if len(info) > MAX_INFO_BYTES:
        raise ConfigError(
            f"the engine's configuration has {len(info)} bytes as JSON, but at most {MAX_INFO_BYTES} fit into the "
            "handshake with a front end: give the model fewer names or a smaller generation_config"
        )
    return info


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, type):
        raise ConfigError(
            f"the class {value.__module__}.{value.__qualname__} cannot be used by an engine in another process: put it "
            "into a module that the engine's process can import"
        )
    return value


def _build(kind: Any, value: Any, name: str) -> Any:
    """Convert a value from parsed JSON to the type ``kind``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return _build(kind, value, name)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, name)
    if kind is Path:
        return Path(_require(str, value, name))
    if origin is tuple:
        return tuple(_build(arguments[0], item, name) for item in _require(list, value, name))
    if kind is Any or origin in (Mapping, dict, Literal):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _require(kind, value, name)


def _build_dataclass(kind: Any, value: Any, name: str) -> Any:
    types_of = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind)}
    given = _require(dict, value, name)
    if unknown := sorted(given.keys() - fields):
        raise ConfigError(f"{name} has no field {unknown[0]!r}")
    return kind(**{key: _build(types_of[key], item, f"{name}.{key}") for key, item in given.items()})


def _require(kind: type, value: Any, name: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {kind.__name__}, got {value!r} ({type(value).__name__})")
    return value
