"""Whose share of an engine a request is charged to, under the scheduling policy ``fair``: :class:`Tenant`."""

import hashlib
from dataclasses import dataclass, field

from rustvllm.exceptions import InvalidRequestError

MAX_WEIGHT = 1000
"""Largest weight of a tenant."""
_MAX_NAME_CHARS = 1024
"""Characters of a name that tell it from others: a digest of more would only take time."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One that shares an engine with others, and one of its users.

    The engine sees digests of both names (64 bits each), so a key of an API may be a name.

    Attributes:
        name: Of the tenant; empty: the bucket of all requests without one.
        user: Shares what the tenant gets with its other users; empty: the bucket of requests without one.
        weight: The tenant's share against those of others, 1 to 1000. Of requests that disagree the newest counts.
        payer: What the engine gets of it: digest of the name, digest of the user, weight.
    """

    name: str = field(default="", repr=False)
    user: str = ""
    weight: int = 1
    payer: tuple[int, int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what in ("name", "user"):
            value = getattr(self, what)
            if not isinstance(value, str):
                raise InvalidRequestError(f"{what} of a tenant must be text, got {type(value).__name__}", "tenant")
        weight: object = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int) or not 1 <= weight <= MAX_WEIGHT:
            raise InvalidRequestError(
                f"weight of a tenant must be a whole number from 1 to {MAX_WEIGHT}, got {weight!r:.80}", "tenant"
            )
        object.__setattr__(self, "payer", (_digest(self.name), _digest(self.user), self.weight))


def _digest(name: str) -> int:
    """64 bits that say nothing of a name; 0 for none."""
    if not name:
        return 0
    text = name[:_MAX_NAME_CHARS].encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"rustvllm tenant").digest(), "little")
