"""To whom a command line shows the live page. Light on purpose: ``--help`` and the launcher read this."""

import argparse
from typing import Literal, TypeAlias

from rustvllm.server.flags.host_names import is_loopback

DashboardAccess: TypeAlias = Literal["local", "any", "remote", "off"]
"""``local``: to this machine, under its own names. ``any``: to all that reach the server, as was asked for.

``remote``: off, because other machines reach the server. ``off``: off, as was asked for.
"""


def add_dashboard_args(group: "argparse._ArgumentGroup") -> None:
    """Add the flags of the live page."""
    flags = group.add_mutually_exclusive_group()
    flags.add_argument(
        "--enable-dashboard",
        action="store_true",
        help="serve the live page /dashboard to every client that reaches the server (default: only if the server "
        "listens on a loopback address or a Unix socket, and only under localhost and similar names)",
    )
    flags.add_argument("--disable-dashboard", action="store_true", help="do not serve the live page /dashboard")


def dashboard_access(args: argparse.Namespace) -> DashboardAccess:
    """What the flags and the address say."""
    if args.disable_dashboard:
        return "off"
    if args.enable_dashboard:
        return "any"
    return "local" if args.uds or is_loopback(args.host) else "remote"
