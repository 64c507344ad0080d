"""The listening socket, bound before anything slow happens, so that a taken port is known at once.

Light on purpose: it is imported and used before FastAPI, the engine and torch.
"""

import dataclasses
import errno
import ipaddress
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from rustvllm.exceptions import ConfigError

BACKLOG = 2048


@dataclass
class Listener:
    """A bound and listening socket.

    Attributes:
        socket: The socket.
        url: Where to reach it; for a Unix socket the base URL that clients put in front of paths.
        uds: Path of the Unix socket, None for TCP.
    """

    socket: socket.socket
    url: str
    uds: Path | None = None

    def with_tls(self) -> "Listener":
        """This listener, reached by HTTPS."""
        return dataclasses.replace(self, url=self.url.replace("http://", "https://", 1))

    def curl_target(self) -> str:
        """What goes behind ``curl`` in front of the path."""
        return self.url if self.uds is None else f"--unix-socket {self.uds} {self.url}"

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines can reach it."""
        if self.uds is not None:
            return False
        return not ipaddress.ip_address(self.socket.getsockname()[0].partition("%")[0]).is_loopback

    def close(self) -> None:
        """Stop listening and remove the Unix socket's file."""
        self.socket.close()
        if self.uds is not None:
            self.uds.unlink(missing_ok=True)


def listen_tcp(host: str, port: int) -> Listener:
    """Listen on ``host``:``port``; port 0 takes a free one.

    Raises:
        ConfigError: The host is unknown, or the port is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as exc:
        raise ConfigError(f"cannot resolve the host {host!r}: {exc}; give an address of this machine") from exc
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        # Two sockets may share a port until one listens; so a port is ours only once this has worked.
        server.listen(BACKLOG)
    except OSError as exc:
        server.close()
        raise ConfigError(_why_not(exc, host, port)) from exc
    server.setblocking(False)
    bound_port = server.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    shown = f"[{reachable}]" if ":" in reachable else reachable
    return Listener(server, f"http://{shown}:{bound_port}")


def listen_unix(path: str) -> Listener:
    """Listen on a Unix socket; a socket file that no process answers on is replaced.

    Raises:
        ConfigError: A process answers there, the path is something else, or it cannot be made.
    """
    file = Path(path)
    try:
        if file.exists():
            if not stat.S_ISSOCK(file.stat().st_mode):
                raise ConfigError(f"--uds {path} exists and is not a socket; remove it or choose another path")
            if _answers(path):
                raise ConfigError(f"--uds {path} is in use by another server; stop it or choose another path")
            file.unlink()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(path)
            file.chmod(0o600)
            server.listen(BACKLOG)
        except OSError:
            server.close()
            raise
    except OSError as exc:
        raise ConfigError(f"cannot listen on --uds {path}: {exc.strerror or exc}") from exc
    server.setblocking(False)
    return Listener(server, "http://localhost", file)


def _answers(path: str) -> bool:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(1)
    try:
        probe.connect(path)
    except OSError:
        return False
    finally:
        probe.close()
    return True


def _why_not(exc: OSError, host: str, port: int) -> str:
    if exc.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host or 'this machine'} is in use by another program; "
            "stop it, or choose another with --port (0 takes a free one)"
        )
    if exc.errno == errno.EACCES:
        return f"port {port} needs privileges that this user lacks; choose one of 1024 or more with --port"
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; use --host 127.0.0.1, or 0.0.0.0 for all of its addresses"
    return f"cannot listen on {host}:{port}: {exc.strerror or exc}"
