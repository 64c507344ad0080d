"""Names that a server is called by: what a ``Host`` header says, and which names lead a machine to itself.

Light on purpose: ``--help`` and the launcher read this.
"""

import ipaddress
import re
from typing import Final

ANY_HOST: Final = "*"
_LOOPBACK_NAMES: Final = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
_HOST_AND_PORT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]*)?")


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is one by which a machine reaches itself."""
    name = _plain(name)
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str | None:
    """The name or address in a ``Host`` header, without port and brackets; None if it has none of the right form."""
    found = _HOST_AND_PORT.fullmatch(header)
    return None if found is None else _plain(found[1] or found[2])


def is_among(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of ``patterns`` is ``name``, or is ``*.example.org`` and ``name`` ends so, or is ``*``."""
    for pattern in map(_plain, patterns):
        if pattern in (ANY_HOST, name) or (pattern.startswith("*.") and name.endswith(pattern[1:])):
            return True
    return False


def _plain(name: str) -> str:
    """Lower case, and without the dot that a full name may end with."""
    return name.lower().removesuffix(".")
