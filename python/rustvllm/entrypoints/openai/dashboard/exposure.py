"""To whom a command line shows the live page. Light on purpose: ``--help`` and the launcher read this."""

import argparse
import ipaddress
from typing import Final, Literal, TypeAlias

DashboardAccess: TypeAlias = Literal["local", "any", "remote", "off"]
"""``local``: to this machine, under its own names. ``any``: to whoever reaches the server, as was asked for.

``remote``: to nobody, because others reach the server. ``off``: to nobody, as was asked for.
"""

_LOCAL_NAMES: Final = frozenset({"localhost", "ip6-localhost"})


def add_dashboard_args(group: "argparse._ArgumentGroup") -> None:
    """Add the flags of the live page."""
    flags = group.add_mutually_exclusive_group()
    flags.add_argument(
        "--enable-dashboard",
        action="store_true",
        help="serve the live page /dashboard to whoever reaches the server (default: only where the server listens on "
        "a loopback address or a Unix socket, and under this machine's own names)",
    )
    flags.add_argument("--disable-dashboard", action="store_true", help="no live page at /dashboard")


def dashboard_access(args: argparse.Namespace) -> DashboardAccess:
    """What the flags and the address say."""
    if args.disable_dashboard:
        return "off"
    if args.enable_dashboard:
        return "any"
    return "local" if args.uds or is_loopback(args.host) else "remote"


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is one by which this machine alone reaches itself."""
    if name.lower() in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
