"""The address where an engine listens, ``unix:/path`` or ``tcp:HOST:PORT``, and the secret that TCP requires."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from rustvllm import envs
from rustvllm.exceptions import ConfigError

MAX_SOCKET_PATH_BYTES = 107
"""The length of Linux's ``sun_path`` without the terminating zero."""
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


@dataclass(frozen=True)
class EngineAddress:
    """The path of a Unix socket, or a host and a port (0: the system chooses a free one)."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_tcp(self) -> bool:
        """Whether this is a TCP address, which requires a secret."""
        return self.path is None

    @classmethod
    def parse(cls, text: str) -> "EngineAddress":
        """Parse an address from the command line.

        Raises:
            ConfigError: ``text`` is not an address, or its path is too long for a socket.
        """
        kind, _, rest = text.partition(":")
        if kind == "unix" and rest.startswith("/"):
            if (length := len(os.fsencode(rest))) > MAX_SOCKET_PATH_BYTES:
                raise ConfigError(
                    f"the engine address {text} has a path of {length} bytes, but the path of a Unix socket has at "
                    f"most {MAX_SOCKET_PATH_BYTES}: choose a shorter one"
                )
            return cls(path=Path(rest))
        host, _, port = rest.rpartition(":")
        if kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) <= 65535:
            return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))
        raise ConfigError(
            f"an engine address must be unix:/path or tcp:HOST:PORT with a port up to 65535, got {text!r}"
        )

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"

    def resolve(self) -> str:
        """Resolve the host of a TCP address; returns ``IP:PORT``.

        Raises:
            ConfigError: The host cannot be resolved.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"cannot resolve the host of the engine address {self}: {error}") from error
        ip = found[0][4][0]
        return f"[{ip}]:{self.port}" if ":" in str(ip) else f"{ip}:{self.port}"


def read_secret(file: str | None) -> bytes | None:
    """Read the secret that both ends of a TCP connection must know: from the file, else from the environment.

    Returns:
        The secret, or None if neither is given.

    Raises:
        ConfigError: The file cannot be read, or the secret is too short or too long. The message never shows it.
    """
    if file is None:
        text = envs.engine_secret()
        source, secret = f"environment variable {envs.ENGINE_SECRET}", text.encode() if text else None
    else:
        source = f"--engine-secret-file {file}"
        try:
            with Path(file).open("rb") as opened:
                secret = opened.read(MAX_SECRET_BYTES + 2).strip()
        except OSError as error:
            raise ConfigError(f"cannot read {source}: {error.strerror or error}") from error
    if secret is not None and not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{source} has {len(secret)} bytes, but a secret must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}; make "
            "one with: openssl rand -hex 32"
        )
    return secret
