"""``--middleware``: classes and functions of the user's around every endpoint."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from rustvllm.exceptions import ConfigError


def add_custom_middleware(app: FastAPI, paths: tuple[str, ...]) -> None:
    """Put what ``paths`` name around ``app``, the last outermost.

    Raises:
        ConfigError: One cannot be imported, or is neither a class nor a coroutine function.
    """
    for path in paths:
        found = _load(path)
        if inspect.isclass(found):
            factory: Any = found
            app.add_middleware(factory)
        elif inspect.iscoroutinefunction(found):
            app.middleware("http")(found)
        else:
            raise ConfigError(
                f"--middleware {path} must name a class that takes the ASGI application, or a coroutine function that "
                f"takes request and call_next; it is {type(found).__name__}"
            )


def _load(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    here = str(Path.cwd())
    if here not in sys.path:  # the command of a package does not look where it is called
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"--middleware {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"--middleware {path}: the module {module_name} has no {name!r}")
    return getattr(module, name)
