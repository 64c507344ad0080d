"""Types of the Rust core, ``rustvllm._core``: the scheduler, its handle, the tokenizer and the output processor.

The arrays that cross the boundary every step are described in ``docs/boundary.md``.

The other files of this folder are parts of the stub, by subject. At run time there is one module, ``_core.abi3.so``
next to this folder: import from ``rustvllm._core`` alone, but for types that exist in the stub only
(``TYPE_CHECKING``). A folder without ``__init__.py`` never comes before an extension module of its name.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Self, TypeAlias, TypedDict, final, overload, type_check_only

import numpy as np
import numpy.typing as npt

from rustvllm._core._attention import CpuAttention as CpuAttention
from rustvllm._core._attention import CpuAttentionPlan as CpuAttentionPlan
from rustvllm._core._bench import bench_serve as bench_serve
from rustvllm._core._bench import bench_step as bench_step
from rustvllm._core._bench import bench_trace as bench_trace
from rustvllm._core._bench import served_model as served_model
from rustvllm._core._decoder import CpuDecoder as CpuDecoder
from rustvllm._core._gguf import GgufFile, gguf_type_sizes, unpack_blocks
from rustvllm._core._grammar import Grammars as Grammars
from rustvllm._core._grammar import GrammarSpec as GrammarSpec
from rustvllm._core._linear import CpuThreads as CpuThreads
from rustvllm._core._linear import PackedLinear as PackedLinear
from rustvllm._core._linear import layer_norm as layer_norm
from rustvllm._core._linear import rms_norm as rms_norm
from rustvllm._core._output import OutputProcessor as OutputProcessor
from rustvllm._core._output import RequestDelta as RequestDelta
from rustvllm._core._output import StopStrings as StopStrings
from rustvllm._core._query import EngineQuery as EngineQuery
from rustvllm._core._sampling import SAMPLING_FLOAT_COLUMNS as SAMPLING_FLOAT_COLUMNS
from rustvllm._core._sampling import SAMPLING_INT_COLUMNS as SAMPLING_INT_COLUMNS
from rustvllm._core._sampling import SAMPLING_NUMBERS as SAMPLING_NUMBERS
from rustvllm._core._sampling import SamplingExtras as SamplingExtras
from rustvllm._core._sampling import draw_kernel as draw_kernel
from rustvllm._core._sampling import draw_token_ids as draw_token_ids
from rustvllm._core._tokenizer import TokenIds as TokenIds
from rustvllm._core._tokenizer import Tokenizer as Tokenizer
from rustvllm._core._tokenizer import TokenizerPool as TokenizerPool
from rustvllm._core._turn import (
    Tools,
    TurnParser,
    begins_within_reasoning,
    find_reasoning_format,
    find_tool_call_format,
    reasoning_formats,
    reasoning_markers,
    tool_call_format_facts,
    tool_call_formats,
)

__all__ = [
    "SAMPLING_FLOAT_COLUMNS",
    "SAMPLING_INT_COLUMNS",
    "SAMPLING_NUMBERS",
    "CpuAttention",
    "CpuAttentionPlan",
    "CpuDecoder",
    "CpuThreads",
    "DrafterConfig",
    "EngineClient",
    "EngineHandle",
    "EngineQuery",
    "EngineServer",
    "GgufFile",
    "GrammarSpec",
    "Grammars",
    "OutputProcessor",
    "PackedLinear",
    "RequestDelta",
    "RequestSummary",
    "SamplingExtras",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "StopStrings",
    "TokenIds",
    "Tokenizer",
    "TokenizerPool",
    "Tools",
    "TurnParser",
    "__version__",
    "begins_within_reasoning",
    "bench_serve",
    "bench_step",
    "bench_trace",
    "build_profile",
    "draw_kernel",
    "draw_token_ids",
    "find_reasoning_format",
    "find_tool_call_format",
    "gguf_type_sizes",
    "layer_norm",
    "reasoning_formats",
    "reasoning_markers",
    "rms_norm",
    "served_model",
    "step_buffer_spec",
    "tool_call_format_facts",
    "tool_call_formats",
    "unpack_blocks",
]

_Ids: TypeAlias = npt.NDArray[np.int32]
_LogprobArrays: TypeAlias = tuple[_Ids, _Ids, npt.NDArray[np.float32], _Ids]

__version__: str
build_profile: Literal["release", "debug"]

def step_buffer_spec(
    config: SchedulerConfig,
) -> list[tuple[str, Literal["int32", "int64", "float32"], tuple[int, ...]]]:
    """Name, dtype and shape of every array of one step-buffer set (C-contiguous, host memory, pinned for a GPU)."""

@final
class DrafterConfig:
    """Drafts that the scheduler makes; the names are those of ``speculative_config``."""

    def __new__(
        cls,
        *,
        method: Literal["ngram", "suffix"],
        prompt_lookup_min: int = 5,
        prompt_lookup_max: int = 5,
        suffix_decoding_max_tree_depth: int = 24,
        suffix_decoding_max_spec_factor: float = 1.0,
        suffix_decoding_min_token_prob: float = 0.1,
        caps: Sequence[tuple[int, int, int]] = ...,
        adaptive: bool = True,
    ) -> DrafterConfig: ...

@final
class SchedulerConfig:
    def __new__(
        cls,
        *,
        num_blocks: int,
        max_model_len: int,
        block_size: int = 16,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.0,
        max_num_queued_reqs: int = 65536,
        max_num_queued_tokens: int = 0,
        queue_timeout: float = 0.0,
        max_steps_in_flight: int = 1,
        num_speculative_tokens: int = 0,
        drafter: DrafterConfig | None = None,
        preemption_mode: Literal["recompute", "swap"] = "recompute",
        num_cpu_blocks: int = 0,
        preemption_immunity_steps: int = 8,
        max_look_past: int = 0,
        max_times_passed: int = 8,
        max_loras: int = 0,
        hash_algorithm: Literal["siphash13", "sha256"] = "siphash13",
        collect_metrics: bool = True,
    ) -> Self:
        """Numbers that fix a scheduler. Raises ``ValueError`` naming the value and the limit."""
    num_blocks: int
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: Literal["fcfs", "priority", "fair"]
    watermark: float
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    """Prompt tokens that may wait; 0: no limit. A longer prompt is accepted when the queue is empty."""
    queue_timeout: float
    """Seconds that a request may wait for its first step; 0.0: no limit."""
    max_steps_in_flight: int
    num_speculative_tokens: int
    preemption_mode: Literal["recompute", "swap"]
    num_cpu_blocks: int
    preemption_immunity_steps: int
    max_look_past: int
    max_times_passed: int
    max_loras: int
    hash_algorithm: Literal["siphash13", "sha256"]
    collect_metrics: bool
    """Whether times and sizes of requests and steps are counted."""
    num_buffer_sets: int
    """Sets of step buffers that a scheduler of these numbers needs: ``max_steps_in_flight + 1``."""

@final
class SchedulerOutput:
    """What one step runs: scalars here, the rest in the arrays of set ``buffer_index`` (see ``docs/boundary.md``)."""

    step: int
    buffer_index: int
    num_reqs: int
    total_num_scheduled_tokens: int
    max_num_scheduled_tokens: int
    max_seq_len: int
    num_sampled: int
    num_prompt_logprobs_reqs: int
    num_prompt_logprobs: int
    num_new_reqs: int
    num_block_table_updates: int
    num_finished: int
    num_preempted: int
    num_logits: int
    """Rows of logits: one per sampled request and one per draft."""
    num_structured_output_reqs: int
    num_swap_out: int
    num_swap_in: int
    num_copies: int
    # The same content under the field's names, for tests and people; SchedulerStateError once the step is updated.
    scheduled_new_reqs: list[dict[str, Any]]
    scheduled_cached_reqs: list[dict[str, Any]]
    resumed_req_ids: list[str]
    num_scheduled_tokens: dict[str, int]
    sampled_req_ids: list[str]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    num_common_prefix_blocks: list[int]
    finished_req_ids: list[str]
    free_encoder_mm_hashes: list[str]
    preempted_req_ids: list[str]
    has_structured_output_requests: bool
    blocks_to_swap_out: list[tuple[int, int]]
    blocks_to_swap_in: list[tuple[int, int]]
    blocks_to_copy: list[tuple[int, int]]
    def debug_view(self) -> dict[str, Any]:
        """All of these in one dict."""

@final
class RequestSummary:
    """A live request as it was when the scheduler was asked for it."""

    request_id: str
    status: str
    num_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_preemptions: int

@final
class Scheduler:
    """The owner's side. The first thread that calls ``schedule`` owns it; another one gets ``WrongThreadError``."""

    def __new__(
        cls, config: SchedulerConfig, step_buffers: Sequence[Mapping[str, npt.NDArray[Any]]] | None = None
    ) -> Self:
        """A scheduler over arrays (see ``step_buffer_spec``); None: over its own, to be read in ``step_buffers``."""
    @property
    def step_buffers(self) -> list[Mapping[str, npt.NDArray[Any]]]: ...
    @property
    def handle(self) -> EngineHandle: ...
    @property
    def config(self) -> SchedulerConfig: ...
    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step into the next buffer set; None when nothing can run now.

        Raises SchedulerStateError when ``max_steps_in_flight`` steps are in flight.
        """
    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: npt.NDArray[np.int32],
        draft_token_ids: npt.NDArray[np.int32] | None = None,
        logprobs: _LogprobArrays | None = None,
        prompt_logprobs: _LogprobArrays | None = None,
    ) -> int:
        """Append sampled tokens (int32 ``[num_sampled, k]``; −1 ends a row), stop, free, emit.

        A row of −1 alone ends its request with an error, one that begins with −2 says that its grammar did not take
        the token. Drafts (int32 ``[num_sampled, d]``, −1 ends a row) run with the next step. ``logprobs`` are of those
        sampled ids whose requests asked: places among the ids (int32 ``[m]``, ascending), candidates (int32 ``[m, c]``,
        the sampled id first, −1 ends a row), their log-probabilities (float32 ``[m, c]``), and the rank of the sampled
        id from 1 (int32 ``[m]``). ``prompt_logprobs`` are of the step's ``prompt_logprobs_targets``, for all of them:
        candidates per place (int32, one per request that asks), token ids and log-probabilities (int32 and float32, row
        after row without gaps, the target first), and the rank of each target (int32).

        Returns the number of requests that finished.
        """
    def record_step_times(
        self, schedule_ns: int, prepare_ns: int, forward_ns: int, sample_ns: int, wait_ns: int, update_ns: int
    ) -> None:
        """When each part of the step began that was updated last (CLOCK_MONOTONIC, ascending); it ends now. Owner."""
    def truncate_drafts(self, scheduler_output: SchedulerOutput, num_kept: Sequence[int]) -> SchedulerOutput:
        """Drop drafts of the newest step that were not made: ``num_kept[i]`` stay for batch position i.

        The arrays are written again; what is returned takes the place of ``scheduler_output``.
        """
    def fail_step(self, scheduler_output: SchedulerOutput) -> int:
        """End a step whose execution failed, and those scheduled after it: their requests finish with an error."""
    def has_unfinished_requests(self) -> bool: ...
    def num_unfinished_requests(self) -> int: ...
    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget every cached block; False while blocks are in use. ``preempt_running`` takes them from all first."""
    def check_invariants(self) -> None: ...
    def sampling_extras(self, row: int) -> SamplingExtras | None:
        """The parameters that are lists, of the request in a persistent row; None without."""
    def token_ids(self, row: int) -> list[int]:
        """Prompt and output of the request in a persistent row (for penalties and for tests)."""
    # the debug face: see docs/scheduler.md
    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int] | npt.NDArray[np.int32] | TokenIds, **params: Any
    ) -> int:
        """``handle.add_request`` under a new key, which is returned."""
    def abort_requests(self, request_ids: Sequence[str]) -> None: ...
    def take_outputs(self) -> list[dict[str, Any]]:
        """All that requests have become since the last call, when no front end takes it.

        ``request_id`` is None for a request that was handed in through ``handle`` and has left since.
        """
    def set_trace(self, enabled: bool, *, with_tokens: bool = False) -> None:
        """Begin or end to record an event for each scheduled request, change of status and, if wanted, token."""
    def take_events(self) -> tuple[list[dict[str, Any]], int]:
        """The newest 65,536 events since the last call, oldest first, and how many were dropped."""
    @property
    def running(self) -> list[RequestSummary]:
        """In order of admission."""
    @property
    def waiting(self) -> list[RequestSummary]:
        """Those without KV in CPU memory, in the order in which they are tried."""
    @property
    def swapped(self) -> list[RequestSummary]:
        """Those whose KV is in CPU memory or on its way there."""
    def queues(self) -> dict[str, list[str]]:
        """Ids ``running``, ``waiting`` and ``leaving``; what has just been handed in is taken in first."""
    def request_state(self, request_id: str) -> dict[str, Any] | None: ...
    def block_states(self) -> list[dict[str, Any]]: ...
    def request_summaries(self, limit: int) -> list[dict[str, Any]]:
        """A row each for the first ``limit`` requests, running ones first: ``request_state`` without its lists."""
    def block_map(self, max_cells: int) -> tuple[bytes, int, list[int]]:
        """A byte per block, or per several when there are more than ``max_cells``; how many blocks a cell has; and how
        many blocks of each use there are.

        0 free, 1 used, 2 cached (free and findable), 3 shared (held by several), 4 the null block; of several blocks,
        what most of them are.
        """
    def prefix_hit_length(
        self, prompt_token_ids: Sequence[int], cache_salt: str | None = None, lora_name: str | None = None
    ) -> int:
        """Tokens of a prompt that the cache would save a request now.

        The last token of a prompt is always computed, so a prompt of whole blocks that are all cached saves one block
        less than it has.
        """
    def stats(self) -> dict[str, int | float]: ...

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
        sampling_extras: SamplingExtras | None = None,
        priority: int = 0,
        payer: tuple[int, int, int] | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        multimodal: Sequence[tuple[int, int, bytes]] = ...,
        skip_reading_prefix_cache: bool = False,
        reports_prompt_progress: bool = False,
        has_stop_strings: bool = False,
        waits_for_grammar: bool = False,
        grammar: GrammarSpec | None = None,
        fork_from: int | None = None,
        arrival_ns: int | None = None,
        samples: Sequence[tuple[int, str, int]] = ...,
        **sampling_numbers: float,
    ) -> None:
        """Hand a request and its samples to an engine; the key comes from ``new_key``.

        ``eos_token_id=None`` means ignore EOS; ``max_tokens=0`` ends with the prefill. ``multimodal`` is (offset,
        length, digest) of each span of placeholder tokens. ``fork_from`` is the key of a live request whose tokens
        begin with this prompt and whose KV is shared. ``samples`` are (key, id, seed) of further requests that fork
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
    def reconnect(self, rank: int, path: str | PathLike[str] | tuple[str, int], timeout: float = 5.0) -> None:
        """Put a restarted engine into the place of ``rank``; ``path`` is its socket, or (host, port).

        Blocks up to ``timeout`` seconds, without the interpreter. What the one before it had ends with
        ``engine_dead``, if it has not yet. Raises as ``connect``, and IndexError for a rank that does not exist;
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
