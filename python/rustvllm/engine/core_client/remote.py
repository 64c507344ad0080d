""":class:`RemoteClient`: engines started elsewhere, as a front end needs them."""

import socket
import threading
from collections.abc import Sequence

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.exceptions import ConfigError, EngineDeadError, QueryError
from rustvllm.logger import init_logger
from rustvllm.process.address import EngineAddress
from rustvllm.process.config_json import load_config
from rustvllm.process.health import EngineHealth, health_of
from rustvllm.process.stall_watch import StallWatch

logger = init_logger(__name__)

WAITING_SECONDS = 5.0
"""After so long without a connection to an engine that should listen the log says so."""
_WAITING_AGAIN_SECONDS = 60.0
_PROBE_SECONDS = 1.0
SILENT = "a process listens there and does not answer"
"""What :func:`probe` says of an engine that hangs."""


class RemoteClient:
    """Connects to engines in :meth:`wait_until_ready`.

    Args:
        addresses: One per engine, by rank; all of one kind.
        secret: For TCP.
        timeout: Seconds to wait for engines that do not listen yet.
        are_loaded: Whether they should listen already, so that the log is to say when they cannot be reached.
        stall_watch: Says which engines to leave because they hang; None leaves none.

    Raises:
        ConfigError: Addresses of both kinds, or TCP without a secret.
    """

    handle: _core.EngineClient
    num_blocks: int
    """KV blocks of the first engine, the null block included."""

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        secret: bytes | None,
        timeout: float,
        *,
        are_loaded: bool = False,
        stall_watch: StallWatch | None = None,
    ) -> None:
        check_addresses(addresses, secret)
        self._addresses = tuple(addresses)
        self._secret = secret
        self._timeout = timeout
        self._are_loaded = are_loaded
        self._stall_watch = stall_watch
        self._stopped = False

    def wait_until_ready(self) -> None:
        """Connect; once is enough.

        Raises:
            EngineDeadError: No engine answers in time, or it refuses.
        """
        is_over = threading.Event()
        if self._are_loaded:
            threading.Thread(target=self._say_waiting, args=(is_over,), daemon=True).start()
        try:
            if not hasattr(self, "handle"):
                self.handle = self._connect()
            self.num_blocks = self.handle.num_blocks
        except (OSError, ValueError) as error:
            where = ", ".join(map(str, self._addresses))
            raise EngineDeadError(f"no engine within {self._timeout:g} s on {where}: {error}") from error
        finally:
            is_over.set()

    def _say_waiting(self, is_over: threading.Event) -> None:
        """In a thread: say what is in the way until that is over."""
        pause = WAITING_SECONDS
        while not is_over.wait(pause):
            for rank, address in enumerate(self._addresses):
                if (why := probe(address)) is not None:
                    logger.warning(
                        "no connection to engine %d on %s yet, tried again and again: %s; check in the engine's log "
                        "that it runs, or restart the server",
                        rank,
                        address,
                        why,
                    )
            pause = _WAITING_AGAIN_SECONDS

    def _connect(self) -> _core.EngineClient:
        if self._addresses[0].path is not None:
            paths = [address.path for address in self._addresses if address.path is not None]
            return _core.EngineClient.connect(paths, self._timeout)
        assert self._secret is not None
        hosts = [(address.host, address.port) for address in self._addresses]
        return _core.EngineClient.connect_tcp(hosts, secret=self._secret, timeout=self._timeout)

    def was_paused(self, rank: int) -> bool:
        """Whether an engine, which may be dead by now, was paused at its last heartbeat."""
        return bool(self.handle.engine_stats(rank)["is_paused"])

    def reconnect(self, rank: int, timeout: float, first_query: tuple[str, bytes] | None = None) -> None:
        """Connect to the engine that was started in a dead one's place.

        Args:
            rank: Whose place.
            timeout: Seconds to wait for it, and for its answer.
            first_query: Kind and payload of what it is asked before it gets requests; see :meth:`query`.

        Raises:
            EngineDeadError: There is none within ``timeout`` seconds, or it does not answer.
        """
        address = self._addresses[rank]
        try:
            self.handle.reconnect(rank, address.path or (address.host, address.port), timeout, first_query)
        except (OSError, ValueError, QueryError) as error:
            raise EngineDeadError(f"no engine {rank} on {address}: {error}") from error

    def leave_silent(self) -> None:
        """Leave engines that hang, if this client is to: what they have ends with an error. Called again and again."""
        if self._stall_watch is None:
            return
        for rank, why in self._stall_watch.look(self.health()).items():
            logger.error("%s; its requests end, and its own launcher may end it", why)
            self.handle.abandon(rank, why)

    @property
    def last_step_error(self) -> str | None:
        """What the last step raised that failed for a request of this client's."""
        return self.handle.last_step_error

    @property
    def errored(self) -> bool:
        """True when no engine is alive."""
        return self.handle.death is not None and not self._stopped

    @property
    def max_model_len(self) -> int:
        """What the first engine settled on."""
        return self.read_config().model.max_model_len

    def read_config(self) -> EngineConfig:
        """What the engines were built from, as they say.

        Raises:
            ConfigError: They are of another release, and say what this one does not know.
        """
        try:
            return load_config(self.handle.info)
        except ConfigError as error:
            raise ConfigError(
                f"the engine on {self._addresses[0]} belongs to another release of rustvllm: {error}"
            ) from error

    def check_alive(self) -> None:
        """Raise EngineDeadError when no engine is alive."""
        if self._stopped:
            raise EngineDeadError("this front end was shut down")
        if (death := self.handle.death) is not None:
            raise EngineDeadError(death)

    def health(self) -> list[EngineHealth]:
        """How every engine is."""
        return health_of(self.handle)

    def query(self, rank: int, kind: str, payload: bytes, timeout: float) -> bytes:
        """Ask the engine's thread; see :meth:`AsyncLLM.query`."""
        return self.handle.query(rank, kind, payload, timeout)

    def stop(self) -> None:
        """Leave the engines: what still runs there ends."""
        self._stopped = True
        if hasattr(self, "handle"):
            self.handle.close()

    def shutdown(self) -> None:
        """The same; idempotent."""
        self.stop()


def probe(address: EngineAddress) -> str | None:
    """Why a plain connection to an engine fails; None if it succeeds."""
    try:
        if address.path is not None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_PROBE_SECONDS)
                connection.connect(str(address.path))
                return None if connection.recv(1) else "a process listens there and closes connections"
        with socket.create_connection((address.host, address.port), _PROBE_SECONDS) as connection:
            connection.settimeout(_PROBE_SECONDS)
            return None if connection.recv(1) else "a process listens there and closes connections"
    except TimeoutError:
        return SILENT
    except FileNotFoundError:
        return "its socket is not there (an engine that runs makes it anew within seconds)"
    except OSError as error:
        return error.strerror or str(error)


def check_addresses(addresses: Sequence[EngineAddress], secret: bytes | None) -> None:
    """Refuse addresses that cannot go together.

    Raises:
        ConfigError: Names them.
    """
    if len({address.is_tcp for address in addresses}) > 1:
        raise ConfigError(
            f"engine addresses must be all unix: or all tcp:, got {', '.join(map(str, addresses))}: one front end "
            "cannot serve from both"
        )
    if len(set(addresses)) < len([address for address in addresses if not (address.is_tcp and address.port == 0)]):
        raise ConfigError(f"every engine needs its own address, got {', '.join(map(str, addresses))}")
    if addresses[0].is_tcp and secret is None:
        raise ConfigError(
            f"the engine address {addresses[0]} is TCP, where both ends must know a secret: set RUSTVLLM_ENGINE_SECRET "
            "or give --engine-secret-file; within one machine unix:/path needs none"
        )
