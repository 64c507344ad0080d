"""Types of the Rust core: an engine in this process, served to others, and the client of one elsewhere."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Self, TypedDict, final, overload, type_check_only

import numpy as np
import numpy.typing as npt

from rustvllm._core._grammar import GrammarSpec
from rustvllm._core._query import EngineQuery
from rustvllm._core._sampling import SamplingExtras
from rustvllm._core._tokenizer import TokenIds

class _TakesRequests:
    """What an engine in this process and a client of others have in common."""

    def add_request(
        self,
        key: int,
        request_id: str,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32] | TokenIds,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        eos_token_id: int | None = None,
        stop_token_ids: Sequence[int] = ...,
        repetition_detection: tuple[int, int, int] | None = None,
        sampling_extras: SamplingExtras | None = None,
        priority: int = 0,
        payer: tuple[int, int, int] | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        multimodal: Sequence[tuple[int, int, bytes, bytes]] = ...,
        skip_reading_prefix_cache: bool = False,
        reports_prompt_progress: bool = False,
        has_stop_strings: bool = False,
        waits_for_grammar: bool = False,
        grammar: GrammarSpec | None = None,
        prediction: Sequence[int] | npt.NDArray[np.int32] | TokenIds | None = None,
        fork_from: int | None = None,
        arrival_ns: int | None = None,
        samples: Sequence[tuple[int, str, int]] = ...,
        **sampling_numbers: float,
    ) -> None:
        """Hand a request and its samples to an engine; the key comes from ``new_key``.

        ``eos_token_id=None`` means ignore EOS; ``max_tokens=0`` ends with the prefill. ``repetition_detection`` is
        (fewest tokens of a pattern, most of them, how often it must come). ``multimodal`` is (offset,
        length, digest, content) of each span of placeholder tokens; the digest names the content in the prefix cache,
        and the worker alone reads the content. ``prediction`` is what the answer is expected to be: drafts where it
        follows that. ``fork_from`` is the key of a live request whose tokens begin with this prompt and
        whose KV is shared. ``samples`` are (key, id, seed) of further requests that fork
        this one: all are taken in together, or none. ``arrival_ns`` is when the request came in (CLOCK_MONOTONIC; None:
        now): latencies count from then, and under priority scheduling it orders those of one priority. ``payer`` is
        (tenant, user, weight): digests of whose share the request is charged to under fair scheduling, and that share.
        ``sampling_numbers`` are those of ``SAMPLING_NUMBERS`` by name; one that is left out has its default.

        Raises InvalidRequestError (with the numbers), QueueFullError (a client, when its engine does not take what was
        sent before; a full queue is the request's last delta there) or EngineDeadError.
        """
    def grammar_ready(self, key: int) -> None:
        """The grammar that a request ``waits_for_grammar`` is compiled: it may run."""
    def grammar_failed(self, key: int) -> None:
        """It cannot be compiled: the request ends with an error."""

@final
class EngineHandle(_TakesRequests):
    """The shared side: any thread adds, aborts and reads counters, without a lock."""

    def grammars_full(self, key: int) -> None:
        """There is no room for the grammar of a request: it ends with an error that says to try again."""
    def new_key(self) -> int:
        """A fresh number that names one request between front end and core."""
    def prefix_hint(
        self,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32] | TokenIds,
        *,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> int:
        """Tokens of a prompt that the prefix cache holds: a hint, from any thread."""
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Abort by id; unknown and finished ids are ignored. Each aborted request emits one final output."""
    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Park without the interpreter until something is in the inbox, ``wake`` is called, or the time (s) is over."""
    def wake(self) -> None: ...
    @property
    def output_fd(self) -> int:
        """An eventfd, readable when outputs wait to be polled; for ``loop.add_reader``."""
    def stats(self) -> dict[str, int | float]:
        """Counters readable from any thread: num_running, num_waiting, kv_cache_usage, prefix_cache_hits and others."""
    def metrics(self) -> CountedMetrics:
        """Counters and histograms, readable from any thread."""

@type_check_only
class CountedMetrics(TypedDict):
    """What an engine has counted. A histogram is its bounds, the counts of its buckets (one more) and its sum."""

    counters: dict[str, int]
    histograms: dict[str, tuple[list[float], list[int], float]]

@final
class EngineServer:
    """The engine's side of the transport (see ``docs/transport.md``). Its I/O thread never needs the interpreter."""

    def __new__(
        cls,
        handle: EngineHandle,
        path: str | PathLike[str] | None = None,
        *,
        fd: int | None = None,
        tcp_address: str | None = None,
        secret: bytes | None = None,
        info: bytes = ...,
        max_clients: int = 1024,
    ) -> Self:
        """Listen and serve. The handle's outputs go to clients from now on; polling the handle gives none.

        ``path``: a Unix socket in a directory that is made (mode 700) or is this user's alone. ``fd``: a Unix socket
        that listens already; it is duplicated. ``tcp_address`` (``"127.0.0.1:9000"``; port 0: the
        system chooses) needs a ``secret`` of 16 bytes at least. ``info``, at most 64 KiB, is shown to every client.

        Raises ValueError, PermissionError, FileExistsError or OSError for what is wrong with the place;
        SchedulerStateError when another server has the outputs.
        """
    def stop(self) -> None:
        """Say goodbye to every client and end, within half a second. Idempotent."""
    def fail(self, message: str) -> None:
        """Tell every client why the engine died and end, within half a second."""
    @property
    def is_alive(self) -> bool: ...
    @property
    def tcp_port(self) -> int | None: ...
    def stats(self) -> dict[str, int]:
        """num_clients, num_connections, num_refused, num_failed, num_requests, num_dropped_outputs, num_bytes_sent."""
    def note_step_error(self, message: str) -> None:
        """Say what a step raised, before ``Scheduler.fail_step``: clients have it before their last outputs."""
    def take_queries(self) -> list[EngineQuery]:
        """What clients ask of the thread that steps the engine, oldest first; the handle is woken when some come."""
    def take_complaints(self) -> list[str]:
        """What the log should have since the last call (64 are kept): connections that were refused or cut, and a
        socket whose name was removed. The engine listens under that again within a second or so.
        """

@final
class EngineClient(_TakesRequests):
    """Engines in other processes: what ``EngineHandle`` is in this one. Any thread may call it.

    A request that its engine does not take gives a last delta with ``error_kind`` ``invalid`` or ``queue_full``; when
    an engine's connection is lost, every request that it had gets one with ``engine_dead`` at once. With several
    engines the others go on, and get what comes; ``docs/transport.md`` says which gets what.
    """

    @staticmethod
    def connect(
        path: str | PathLike[str] | Sequence[str | PathLike[str]],
        timeout: float = 5.0,
        *,
        heartbeat_interval: float = 0.2,
    ) -> EngineClient:
        """Connect to a Unix socket, waiting up to ``timeout`` seconds for an engine that does not listen yet.

        Several sockets, in the order of their ranks, are several engines of one client; the timeout is for all.

        Raises ConnectionError when there is none or it refuses, ValueError for an impossible path or an engine whose
        ``max_model_len`` or ``block_size`` is not the first one's.
        """
    @overload
    @staticmethod
    def connect_tcp(
        host: str, port: int, secret: bytes | None = None, timeout: float = 5.0, *, heartbeat_interval: float = 0.2
    ) -> EngineClient:
        """The same over TCP, where both sides prove that they know the secret: without one it raises ValueError."""
    @overload
    @staticmethod
    def connect_tcp(
        host: Sequence[tuple[str, int]],
        port: None = None,
        secret: bytes | None = None,
        timeout: float = 5.0,
        *,
        heartbeat_interval: float = 0.2,
    ) -> EngineClient:
        """Several engines, as (host, port) in the order of their ranks, with one secret."""
    def reconnect(
        self,
        rank: int,
        path: str | PathLike[str] | tuple[str, int],
        timeout: float = 5.0,
        first_query: tuple[str, bytes] | None = None,
    ) -> None:
        """Put a restarted engine into the place of ``rank``; ``path`` is its socket, or (host, port).

        ``first_query``, a kind and a payload as of ``query``, is answered before the engine gets a request from here.
        Blocks up to ``timeout`` seconds for the connection and as long for that answer, without the interpreter. What
        the one before it had ends with ``engine_dead``, if it has not yet. Raises as ``connect`` and ``query``;
        nothing has changed then.
        """
    def abandon(self, rank: int, reason: str) -> None:
        """Leave the engine of ``rank``, which may hang: what it has ends with ``engine_dead`` and ``reason``.

        The others go on. Another, or the same, takes its place with ``reconnect``.
        """
    @property
    def num_engines(self) -> int:
        """How many engines there are, dead ones included."""
    def engine_health(self, rank: int) -> dict[str, Any]:
        """``is_alive``, ``death``, ``last_heartbeat_age`` and ``step_age`` (s), ``num_steps``, ``pid``, and
        ``num_running`` and ``num_waiting`` (of all clients, at the last heartbeat) of one engine.
        """
    def engine_stats(self, rank: int, timeout: float = 0.0) -> dict[str, int | float]:
        """``stats`` of one engine."""
    def query(self, rank: int, kind: str, payload: bytes, timeout: float) -> bytes:
        """Ask the thread that steps an engine, which answers between two steps; blocks without the interpreter.

        ``kind`` has at most 64 bytes, ``payload`` at most 64 KiB, the answer at most 8 MiB; 8 may be open at a time.

        Raises QueryTimeoutError when there is none within ``timeout`` seconds, QueryError when the engine refuses or
        fails, EngineDeadError, and IndexError for a rank that does not exist.
        """
    def new_key(self) -> int:
        """A fresh number that names one request of this client."""
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Abort this client's requests by id; unknown and finished ids are ignored."""
    @property
    def output_fd(self) -> int:
        """An eventfd, readable when outputs of any engine wait or one has gone; for ``loop.add_reader``."""
    def stats(self, timeout: float = 0.0) -> dict[str, int | float]:
        """Counters of the last heartbeat (none before the first); with a ``timeout`` (s), those of now if they come.

        Of several engines, the sums over those that live (over all when none does): also of ``num_steps`` and
        ``last_updated_step``; ``kv_cache_usage`` is that of all their blocks together.
        """
    def metrics(self, timeout: float = 0.5) -> list[CountedMetrics | None]:
        """What each engine has counted, by rank; None for one that has gone or does not answer in time (seconds)."""
    @property
    def is_alive(self) -> bool:
        """Whether an engine is left."""
    @property
    def death(self) -> str | None:
        """Why the engine ended; None while it runs."""
    @property
    def last_step_error(self) -> str | None:
        """What the last step raised that failed for a request of this client's; at most 16 KiB."""
    def check_alive(self) -> None:
        """Raise EngineDeadError, with the reason, when no engine is left."""
    @property
    def last_heartbeat_age(self) -> float:
        """Seconds since the engine's process answered; of several living ones, the longest."""
    @property
    def step_age(self) -> float:
        """Seconds for which the engine has had something to do and has done nothing, 0.0 when idle; the longest."""
    @property
    def num_steps(self) -> int: ...
    @property
    def client_index(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int:
        """KV blocks of the first engine, as of the connection; so are the numbers that follow."""
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_queued_reqs(self) -> int: ...
    @property
    def engine_pid(self) -> int:
        """The process of the first engine, as it is now; ``engine_health`` has all."""
    @property
    def info(self) -> bytes:
        """What the owner of the first engine gave its ``EngineServer``."""
    def close(self) -> None:
        """Disconnect: what runs gets its last output, here and in the engine. Idempotent."""
