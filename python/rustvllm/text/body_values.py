"""Counts what the fields of a JSON body hold, before anything of it is made."""

from typing import NamedTuple

from rustvllm import _core

MAX_COUNTED_FIELDS = 256
"""Fields that are counted one by one; what comes after them is counted as the last one's."""


class FieldValues(NamedTuple):
    """What a field holds.

    Attributes:
        name: Its name; a field that is there twice is counted twice.
        num_values: Values in it at any depth, and itself; names of members are none.
        num_objects: Those of them that are objects.
        num_lists: Those of them that are lists.
    """

    name: str
    num_values: int
    num_objects: int
    num_lists: int


def count_body_values(body: bytes) -> list[FieldValues]:
    """What each field of the object ``body`` holds, in its order; none if it is not an object.

    The core counts while other threads have the interpreter; a parse holds it from its first value to its last.
    """
    return [FieldValues(*counted) for counted in _core.count_body_values(body) or ()]
