"""Checks of values that a client sent; each names the parameter, the value and the limit."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

from rustvllm.exceptions import InvalidRequestError

_SHOWN_CHARS = 80
_QUOTES_UP_TO = 1 << 16  # characters of a text among which quotes are looked for


def check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse what is not a finite number from ``low`` to ``high``; ``open_low`` excludes ``low`` itself."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, got {shown(value)} ({type(value).__name__})", name)
    try:
        number = float(value)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} must be finite, got {shown(value)}", name)
    if number > high or number < low or (open_low and number == low):
        if high == math.inf:
            limits = f"greater than {low:g}" if open_low else f"at least {low:g}"
        else:
            limits = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidRequestError(f"{name} must be {limits}, got {shown(value)}", name)


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse what is not an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {shown(value)} ({type(value).__name__})", name)
    if value < low:
        raise InvalidRequestError(f"{name} must be at least {low}, got {shown(value)}", name)
    if high is not None and value > high:
        raise InvalidRequestError(f"{name} must be at most {high}, got {shown(value)}", name)


def check_bool(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be True or False, got {shown(value)}", name)


def entries_for_each(name: str, given: object, num_prompts: int, expected: str) -> Sequence[Any]:
    """The entries of a list with one for each prompt; any iterable that has an order may stand for it.

    Args:
        name: Of the argument.
        given: A list, a tuple, a generator, an array …; what its entries are is checked by the caller.
        num_prompts: So many are needed; of what has no length, one more is taken at most.
        expected: What is missing when ``given`` is none of these, for instance ``an integer or a list of integers``.

    Raises:
        InvalidRequestError: It is something else, or has another number of entries.
    """
    if hasattr(given, "tolist"):  # an array, whose numbers are Python's then
        given = given.tolist()
    if isinstance(given, str | bytes | bytearray | Mapping | set | frozenset) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{name} must be {expected}, got {shown(given)} ({type(given).__name__})", name)
    entries = given if isinstance(given, Sequence) else list(islice(given, num_prompts + 1))
    if len(entries) != num_prompts:
        more = "more than " if entries is not given and len(entries) > num_prompts else ""
        count = num_prompts if more else len(entries)
        raise InvalidRequestError(
            f"{name} has {more}{count} entries for {num_prompts} prompts; give one, or one per prompt", name
        )
    return entries


def is_number(value: object) -> bool:
    """Whether it is a number, infinite ones included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not (isinstance(value, float) and math.isnan(value))


def is_valid_unicode(text: str) -> bool:
    """False for text with lone surrogates, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """The beginning of the ``repr`` of what a client sent; however long that is, this takes microseconds."""
    try:
        text = repr(_beginning(value, _SHOWN_CHARS + 2))
    except ValueError:  # an int of thousands of digits, which Python refuses to print
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _beginning(value: object, room: int) -> object:
    """A value whose ``repr`` has the same first ``room`` characters, and not many more."""
    if type(value) is str and len(value) > room:
        text = value[:room]
        # Which quotes stand around a text, and which are escaped, depends on those in all of it.
        missing = [quote for quote in "'\"" if quote not in text and value.find(quote, 0, _QUOTES_UP_TO) >= 0]
        return text + "".join(missing)
    if isinstance(value, str | bytes):
        return value[:room] if type(value) is bytes else value
    room -= 1  # for the bracket
    if type(value) is list:
        some = []
        for item in value:
            if room <= 0:
                break
            some.append(_beginning(item, room))
            room -= len(repr(some[-1])) + len(", ")
        return some
    if type(value) is dict:
        members = {}
        for name, item in value.items():
            if room <= 0:
                break
            key = _beginning(name, _SHOWN_CHARS + 2)  # or the rest of one name could be another
            room -= len(repr(key)) + len(": ")
            members[key] = _beginning(item, max(room, 1))
            room -= len(repr(members[key])) + len(", ")
        return members
    return value


def refuse_attribute(owner: object, name: str, unbuilt: Mapping[str, str]) -> NoReturn:
    """Say of a name of vLLM why it is not there, in place of a bare name.

    Args:
        owner: The object that was asked for it.
        name: The attribute.
        unbuilt: Why each name of vLLM's that is not built is not there.

    Raises:
        AttributeError: Always, so that ``hasattr`` and ``getattr`` with a default tell what is there.
    """
    kind = type(owner).__name__
    if name in unbuilt:
        raise AttributeError(f"{kind}.{name} is not supported yet: {unbuilt[name]}", name=name, obj=owner)
    raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


def as_list(name: str, value: object) -> list[Any]:
    """A list of the entries; refuses what is not a list."""
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name} must be a list, got {shown(value)} ({type(value).__name__})", name)
    return list(value)


def as_strings(stop: object) -> tuple[str, ...]:
    """``stop`` as a tuple of texts; refuses what cannot be found in a text."""
    if not stop and isinstance(stop, tuple | None):
        return ()
    strings = [stop] if isinstance(stop, str) else as_list("stop", stop)
    for string in strings:
        if not isinstance(string, str):
            raise InvalidRequestError(
                f"stop must be a string or a list of strings, got {shown(string)} ({type(string).__name__})", "stop"
            )
        if not string:
            raise InvalidRequestError("stop must not contain an empty string", "stop")
        if not is_valid_unicode(string):
            raise InvalidRequestError(f"stop must be valid Unicode, got {shown(string)}", "stop")
    return tuple(strings)
