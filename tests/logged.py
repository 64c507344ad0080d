"""What is logged while a test runs, whatever handlers and levels there are besides."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The messages of a logger and those below it, as they come."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
