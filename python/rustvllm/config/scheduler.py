"""``SchedulerConfig``: limits of a step and of the queue, and what happens when blocks are short."""

from dataclasses import dataclass
from typing import Literal

from rustvllm.config.ranges import require_choice, require_int, require_number
from rustvllm.exceptions import ConfigError

SCHEDULING_POLICIES = ("fcfs", "priority", "fair")
PreemptionMode = Literal["recompute", "swap"]
"""What happens to a preempted request's KV: it is computed again, or its blocks move to CPU memory."""
PREEMPTION_MODES: tuple[PreemptionMode, ...] = ("recompute", "swap")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the waiting queue, in requests and tokens, and what happens when blocks are short.

    Attributes:
        max_num_seqs: Requests in one step at most.
        max_num_batched_tokens: Tokens in one step at most.
        enable_chunked_prefill: A prompt may be computed over several steps.
        long_prefill_token_threshold: Longest chunk, where prompts are chunked, next to other requests; 0: no limit.
        stream_interval: Tokens of each streamed output, see :class:`~rustvllm.sampling_params.SamplingParams`.
        scheduling_policy: ``fcfs``, ``priority`` or ``fair``: tenants share the engine by their weights.
        max_num_queued_reqs: Requests that may wait.
        max_num_queued_tokens: Prompt tokens that may wait, of all clients; 0: no limit. An empty queue takes any.
        queue_timeout: Seconds that a request may wait for its first step; 0 for as long as it takes.
        watermark: Share of the KV blocks that an admission must leave free while other requests run.
        preemption_mode: What happens to the KV of a preempted request.
        preemption_immunity_steps: Steps in which a resumed request is not preempted again if there is another victim.
        max_look_past: Waiting requests tried in a step after one that does not fit; 0 keeps the order.
        max_times_passed: How often later requests may pass one that does not fit.
        async_scheduling: A step is planned while the device computes the one before it.
        structured_outputs_fast_forward: Tokens that a grammar leaves no choice about take no step each.
        grammar_mask_wait_ms: How long a step waits behind the model for late masks, before it goes on without them.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    stream_interval: int = 1
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int = 65536
    max_num_queued_tokens: int = 0
    queue_timeout: float = 0.0
    watermark: float = 0.0
    preemption_mode: PreemptionMode = "recompute"
    preemption_immunity_steps: int = 8
    max_look_past: int = 0
    max_times_passed: int = 8
    async_scheduling: bool = False
    structured_outputs_fast_forward: bool = True
    grammar_mask_wait_ms: float = 0.0

    def __post_init__(self) -> None:
        require_int("max_num_seqs", self.max_num_seqs, 1, 65536)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**24)
        require_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, 2**31 - 1)
        require_int("stream_interval", self.stream_interval, 1, 2**31 - 1)
        require_int("max_num_queued_reqs", self.max_num_queued_reqs, 1, 2**24)
        require_int("max_num_queued_tokens", self.max_num_queued_tokens, 0, 2**40)
        require_number("queue_timeout", self.queue_timeout, 0, 365 * 86400)
        require_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        require_number("watermark", self.watermark, 0, 1)
        require_number("grammar_mask_wait_ms", self.grammar_mask_wait_ms, 0, 10_000)
        require_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        for name in ("preemption_immunity_steps", "max_look_past", "max_times_passed"):
            require_int(name, getattr(self, name), 0, 2**31 - 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token of a step"
            )
