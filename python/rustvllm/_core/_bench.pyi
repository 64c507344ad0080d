"""Types of the benchmarks in the Rust core; they are functions of ``rustvllm._core``."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

def bench_step(
    num_running: int,
    num_steps: int,
    *,
    prefill_tokens: int = 0,
    steps_in_flight: int = 1,
    scheduling_policy: str = "fcfs",
) -> dict[str, int | float]:
    """What a step of ``num_running`` decodes costs in Rust alone.

    With ``prefill_tokens`` each step also admits a prompt of that length, which ends with it. ``scheduling_policy`` is
    'fcfs', 'priority' or 'fair'. Returns num_blocks,
    block_size and the medians (µs) schedule_us, update_us and total_us. Raises ``ValueError`` naming the value and the
    limit. Releases the interpreter; Ctrl-C ends it.
    """

def bench_trace(
    path: str | PathLike[str],
    *,
    trace_format: str = "auto",
    limit: int | None = None,
    block_size: int = 16,
    num_blocks: int = 16384,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    enable_prefix_caching: bool = True,
    step_base_us: float | None = None,
    step_per_token_us: float | None = None,
    step_per_context_token_us: float | None = None,
    per_request: bool = False,
) -> dict[str, Any]:
    """Replay the first ``limit`` requests of a trace through a scheduler, with a model of step time instead of a model.

    Returns counts, seconds in the control plane, the prefix hit rate and queue times; ``docs/benchmarks.md`` explains
    each. ``per_request`` adds ``hit_blocks_per_request`` (None for a refused one). Raises TraceError, or ``ValueError``
    naming the value and the limit. Releases the interpreter; Ctrl-C ends it.
    """

def bench_serve(
    base_url: str,
    endpoint: str,
    fields: str,
    *,
    num_prompts: int,
    random: Mapping[str, int | float] | None = None,
    texts: Sequence[tuple[str, int]] | None = None,
    trace: str | PathLike[str] | None = None,
    vocab_size: int | None = None,
    request_rate: float | None = None,
    burstiness: float = 1.0,
    as_recorded: bool = False,
    max_concurrency: int | None = None,
    num_warmups: int = 0,
    seed: int = 0,
    timeout_s: float = 3600.0,
    percentiles: Sequence[float] = ...,
    goodput_ttft_ms: float | None = None,
    goodput_tpot_ms: float | None = None,
    goodput_e2el_ms: float | None = None,
    api_key: str | None = None,
    progress: Callable[[int, int, int, bool], object] | None = None,
    detailed: bool = False,
) -> dict[str, Any]:
    """Send ``num_prompts`` requests to an OpenAI-compatible server over HTTP and time their streams.

    ``fields`` is a JSON object with every field of a request but the prompt and ``max_tokens``. Prompts come from one
    of: ``random`` (``input_len``, ``output_len``, ``range_ratio``, ``prefix_len``, ``num_prefixes``), ``texts`` (with
    the length of each answer), ``trace`` (a file; ``as_recorded`` keeps its times). They are token ids below
    ``vocab_size``, or words with None. ``request_rate`` None: at once, as far as ``max_concurrency`` lets them.
    ``progress`` is called ten times a second with completed and failed requests, events, and whether this is the
    warm-up still.

    Returns counts, seconds and, for ttft, tpot, itl, e2el (ms) and events_per_stream, a dict with count, mean, median,
    std, min, max and percentiles; ``docs/benchmarks.md`` explains each. ``detailed`` adds ``requests``, in the order
    in which they were sent: each a dict with ``sent`` (seconds from the run's start), ``ttft`` and ``itl``
    (seconds; 0 and none of one that failed), ``input_tokens`` (None if unknown), ``output_tokens`` and ``error`` (empty
    of a whole answer). Raises ``ConnectionError`` without a server, TraceError, or ``ValueError`` naming the value and
    the limit. Releases the interpreter; Ctrl-C ends it.
    """

def served_model(base_url: str, *, api_key: str | None = None) -> str:
    """The first model of the server's ``/v1/models``. Raises ``ConnectionError``; ``ValueError`` for a wrong URL."""
