"""Types of the Rust core, ``rustvllm._core``: the scheduler, its handle, the tokenizer and the output processor.

The arrays that cross the boundary every step are described in ``docs/boundary.md``.

The other files of this folder are parts of the stub, by subject. At run time there is one module, ``_core.abi3.so``
next to this folder: import from ``rustvllm._core`` alone, but for types that exist in the stub only
(``TYPE_CHECKING``). A folder without ``__init__.py`` never comes before an extension module of its name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt

from rustvllm._core._attention import CpuAttention as CpuAttention
from rustvllm._core._attention import CpuAttentionPlan as CpuAttentionPlan
from rustvllm._core._bench import bench_serve as bench_serve
from rustvllm._core._bench import bench_step as bench_step
from rustvllm._core._bench import bench_trace as bench_trace
from rustvllm._core._bench import served_model as served_model
from rustvllm._core._decoder import CpuAdapter as CpuAdapter
from rustvllm._core._decoder import CpuCaches as CpuCaches
from rustvllm._core._decoder import CpuDecoder as CpuDecoder
from rustvllm._core._decoder import CpuLayerDelta as CpuLayerDelta
from rustvllm._core._engine import CountedMetrics as CountedMetrics
from rustvllm._core._engine import EngineClient as EngineClient
from rustvllm._core._engine import EngineHandle as EngineHandle
from rustvllm._core._engine import EngineServer as EngineServer
from rustvllm._core._gguf import GgufFile, gguf_type_sizes, unpack_blocks, whole_blocks
from rustvllm._core._grammar import Grammars as Grammars
from rustvllm._core._grammar import GrammarSpec as GrammarSpec
from rustvllm._core._grammar import MaskTimer as MaskTimer
from rustvllm._core._grammar import grammar_as_lark as grammar_as_lark
from rustvllm._core._linear import CpuThreads as CpuThreads
from rustvllm._core._linear import PackedLinear as PackedLinear
from rustvllm._core._linear import layer_norm as layer_norm
from rustvllm._core._linear import pack_files as pack_files
from rustvllm._core._linear import rms_norm as rms_norm
from rustvllm._core._output import OutputProcessor as OutputProcessor
from rustvllm._core._output import RequestDelta as RequestDelta
from rustvllm._core._output import StopStrings as StopStrings
from rustvllm._core._query import EngineQuery as EngineQuery
from rustvllm._core._sampling import MAX_PATTERN_SIZE as MAX_PATTERN_SIZE
from rustvllm._core._sampling import SAMPLING_FLOAT_COLUMNS as SAMPLING_FLOAT_COLUMNS
from rustvllm._core._sampling import SAMPLING_INT_COLUMNS as SAMPLING_INT_COLUMNS
from rustvllm._core._sampling import SAMPLING_LISTS as SAMPLING_LISTS
from rustvllm._core._sampling import SAMPLING_NUMBERS as SAMPLING_NUMBERS
from rustvllm._core._sampling import SamplingExtras as SamplingExtras
from rustvllm._core._sampling import draw_kernel as draw_kernel
from rustvllm._core._sampling import draw_token_ids as draw_token_ids
from rustvllm._core._sampling import mask_logits as mask_logits
from rustvllm._core._sampling import penalize_logits as penalize_logits
from rustvllm._core._sampling import score_token_ids as score_token_ids
from rustvllm._core._step_channel import FollowedStep as FollowedStep
from rustvllm._core._step_channel import NodeLink as NodeLink
from rustvllm._core._step_channel import RankMeeting as RankMeeting
from rustvllm._core._step_channel import StepReader as StepReader
from rustvllm._core._step_channel import StepWriter as StepWriter
from rustvllm._core._tokenizer import TokenIds as TokenIds
from rustvllm._core._tokenizer import Tokenizer as Tokenizer
from rustvllm._core._tokenizer import TokenizerPool as TokenizerPool
from rustvllm._core._tokenizer import count_body_values as count_body_values
from rustvllm._core._turn import (
    ByteSlices,
    ResponseEvents,
    Tools,
    TurnParser,
    TurnReading,
    begins_within_reasoning,
    custom_input,
    find_reasoning_format,
    find_tool_call_format,
    reasoning_formats,
    reasoning_markers,
    special_reasoning_markers,
    tool_call_format_facts,
    tool_call_formats,
)

__all__ = [
    "MAX_PATTERN_SIZE",
    "SAMPLING_FLOAT_COLUMNS",
    "SAMPLING_INT_COLUMNS",
    "SAMPLING_LISTS",
    "SAMPLING_NUMBERS",
    "ByteSlices",
    "CpuAdapter",
    "CpuAttention",
    "CpuAttentionPlan",
    "CpuCaches",
    "CpuDecoder",
    "CpuLayerDelta",
    "CpuThreads",
    "DrafterConfig",
    "EngineClient",
    "EngineHandle",
    "EngineQuery",
    "EngineServer",
    "GgufFile",
    "GrammarSpec",
    "Grammars",
    "MaskTimer",
    "OutputProcessor",
    "PackedLinear",
    "RequestDelta",
    "RequestSummary",
    "ResponseEvents",
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
    "TurnReading",
    "__version__",
    "begins_within_reasoning",
    "bench_serve",
    "bench_step",
    "bench_trace",
    "build_profile",
    "count_body_values",
    "custom_input",
    "draw_kernel",
    "draw_token_ids",
    "find_reasoning_format",
    "find_tool_call_format",
    "gguf_type_sizes",
    "grammar_as_lark",
    "layer_norm",
    "mask_logits",
    "penalize_logits",
    "reasoning_formats",
    "reasoning_markers",
    "rms_norm",
    "score_token_ids",
    "served_model",
    "special_reasoning_markers",
    "step_buffer_spec",
    "tool_call_format_facts",
    "tool_call_formats",
    "unpack_blocks",
    "whole_blocks",
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
        method: Literal["ngram", "suffix", "draft_model"],
        prompt_lookup_min: int = 5,
        prompt_lookup_max: int = 5,
        suffix_decoding_max_tree_depth: int = 24,
        suffix_decoding_max_spec_factor: float = 1.0,
        suffix_decoding_min_token_prob: float = 0.1,
        suffix_decoding_max_cached_requests: int = 0,
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
        pipeline_stages: int = 1,
        num_speculative_tokens: int = 0,
        drafter: DrafterConfig | None = None,
        preemption_mode: Literal["recompute", "swap"] = "recompute",
        num_cpu_blocks: int = 0,
        preemption_immunity_steps: int = 8,
        max_look_past: int = 0,
        max_times_passed: int = 8,
        max_loras: int = 0,
        max_multimodal_bytes: int = 0,
        disable_chunked_mm_input: bool = False,
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
    pipeline_stages: int
    num_speculative_tokens: int
    preemption_mode: Literal["recompute", "swap"]
    num_cpu_blocks: int
    preemption_immunity_steps: int
    max_look_past: int
    max_times_passed: int
    max_loras: int
    max_multimodal_bytes: int
    disable_chunked_mm_input: bool
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
        pooled: npt.NDArray[np.float32] | None = None,
    ) -> int:
        """Append sampled tokens (int32 ``[num_sampled, k]``; −1 ends a row), stop, free, emit.

        A row of −1 alone ends its request with an error, one that begins with −2 says that its grammar did not take
        the token. Drafts (int32 ``[num_sampled, d]``, −1 ends a row) run with the next step. ``logprobs`` are of those
        sampled ids whose requests asked: places among the ids (int32 ``[m]``, ascending), candidates (int32 ``[m, c]``,
        the sampled id first, −1 ends a row), their log-probabilities (float32 ``[m, c]``), and the rank of the sampled
        id from 1 (int32 ``[m]``). ``prompt_logprobs`` are of the step's ``prompt_logprobs_targets``, for all of them:
        candidates per place (int32, one per request that asks), token ids and log-probabilities (int32 and float32, row
        after row without gaps, the target first), and the rank of each target (int32). A row that begins with −9 ends
        its request with its row of ``pooled`` (float32 ``[num_sampled, width]``).

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
    @property
    def pause_state(self) -> Literal["unpaused", "paused_new", "paused_all"]: ...
    def set_pause_state(self, pause_state: Literal["unpaused", "paused_new", "paused_all"]) -> None:
        """Pause, or end the pause: ``paused_new`` admits no further request, ``paused_all`` plans no step."""
    def is_at_rest(self) -> bool:
        """Whether the scheduler is paused and no step runs, or will run before the pause ends."""
    def abort_all(self) -> int:
        """Abort every request, those in the inbox included; how many there were."""
    def live_adapters(self) -> tuple[list[int], list[int]]:
        """Numbers of the adapters of running requests, and of waiting ones, each once, in ascending order."""
    def adapter_counts(self) -> dict[int, tuple[int, int]]:
        """How many running and how many waiting requests each adapter has; those without any are left out."""
    def add_adapter(self, adapter: int) -> None:
        """Let requests name an adapter, and from now on none that was not added so; 0 adds none."""
    def remove_adapter(self, adapter: int) -> bool:
        """Turn away requests for an adapter from now on, unless a live one needs it; whether that was done."""
    def check_invariants(self) -> None: ...
    def sampling_extras(self, row: int) -> SamplingExtras | None:
        """The parameters that are lists, of the request in a persistent row; None without."""
    def multimodal(self, row: int) -> list[tuple[int, int, bytes, bytes]]:
        """Offset, length, digest and content of each multimodal input of the request in a persistent row."""
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
        """A row each for the first ``limit`` requests, running ones first: ``request_state`` without its lists.

        ``adapter`` is the number of its adapter, 0 without.
        """
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
