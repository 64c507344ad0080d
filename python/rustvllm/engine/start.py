"""The start of an engine: executor, weights, KV cache and scheduler, each after what it needs."""

from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING

from rustvllm import _core
from rustvllm.config import EngineConfig, SpeculationConfig
from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger

if TYPE_CHECKING:
    from rustvllm.executor.interface import Executor

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """What a start has made.

    Attributes:
        config: As it was given, with the ``max_model_len`` that the KV cache can hold.
        executor: Has the model loaded and warmed up.
        scheduler: Writes into the executor's buffers.
        num_blocks: KV blocks, the null block included.
        num_cpu_blocks: KV blocks in CPU memory for preempted requests.
        phases: Seconds of each part, by its name, in order.
    """

    config: EngineConfig
    executor: "Executor"
    scheduler: _core.Scheduler
    num_blocks: int
    num_cpu_blocks: int
    phases: dict[str, float]


def start_engine(config: EngineConfig, node_secret: bytes | None = None) -> StartedEngine:
    """Load the model and take the memory of the KV cache.

    Args:
        config: Of the engine.
        node_secret: What other nodes of the model must know; None: as the environment says.

    Raises:
        ModelLoadError: The weights cannot be read or do not fit the configuration.
        ConfigError: The KV cache cannot hold one request of ``max_model_len`` tokens, or there is not as much memory as
            ``swap_space`` says.
    """
    phases: dict[str, float] = {}
    phase = _Stopwatch(phases)
    executor = make_executor(config, node_secret)
    phase.ended("executor")
    executor.load_model()
    phase.ended("load model")
    num_blocks = executor.determine_num_blocks()
    phase.ended("measure memory")
    config = _fit_max_model_len(config, num_blocks)
    config.check_num_blocks(num_blocks)
    num_cpu_blocks = executor.determine_num_cpu_blocks(num_blocks)
    scheduler_config = _scheduler_config(config, num_blocks, num_cpu_blocks)
    step_buffers = executor.initialize_kv_cache(
        num_blocks, _core.step_buffer_spec(scheduler_config), scheduler_config.num_buffer_sets, num_cpu_blocks
    )
    scheduler = _core.Scheduler(scheduler_config, step_buffers)
    executor.bind_token_ids(scheduler.token_ids, scheduler.sampling_extras, scheduler.multimodal)
    phase.ended("KV cache")
    executor.warm_up()
    phase.ended("warm-up")
    return StartedEngine(config, executor, scheduler, num_blocks, num_cpu_blocks, phases)


def make_executor(config: EngineConfig, node_secret: bytes | None = None) -> "Executor":
    """Imported here: torch takes seconds, and a wrong configuration is refused before it; a simulation needs none."""
    if config.sim is not None:
        from rustvllm.executor.sim import SimExecutor

        return SimExecutor(config, config.sim)
    if config.parallel.node_rank:
        raise ConfigError(
            f"node_rank is {config.parallel.node_rank}, but the engine runs on node 0: start this node with rustvllm "
            "serve --headless and the same flags"
        )
    if config.parallel.num_ranks > 1:
        from rustvllm.executor.multiproc import MultiProcExecutor

        return MultiProcExecutor(config, node_secret)
    from rustvllm.executor.uniproc import UniProcExecutor

    return UniProcExecutor(config)


def _fit_max_model_len(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """The configuration whose ``max_model_len`` the KV cache can hold, if it was left to the engine."""
    fitted = config.fitted(num_blocks)
    longest, asked = fitted.model.max_model_len, config.model.max_model_len
    if longest < asked:
        logger.info("max_model_len is %d, which is what the KV cache can hold; the model supports %d", longest, asked)
    return fitted


def _scheduler_config(config: EngineConfig, num_blocks: int, num_cpu_blocks: int) -> _core.SchedulerConfig:
    speculation = config.speculation
    if speculation is not None and config.model.logits_processors:
        logger.warning("no drafts are made: logits_processors must see every request one token at a time")
        speculation = None
    return _core.SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=config.model.max_model_len,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
        scheduling_policy=config.scheduler.scheduling_policy,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        max_num_queued_tokens=config.scheduler.max_num_queued_tokens,
        queue_timeout=config.scheduler.queue_timeout,
        watermark=config.scheduler.watermark,
        preemption_mode=config.scheduler.preemption_mode,
        num_cpu_blocks=num_cpu_blocks,
        preemption_immunity_steps=config.scheduler.preemption_immunity_steps,
        max_look_past=config.scheduler.max_look_past,
        max_times_passed=config.scheduler.max_times_passed,
        max_loras=0 if config.lora is None else config.lora.max_loras,
        max_multimodal_bytes=0 if config.model.vision is None else config.model.vision.max_content_bytes,
        disable_chunked_mm_input=config.model.vision is not None and config.model.vision.attends_both_ways,
        hash_algorithm=config.cache.hash_algorithm,
        collect_metrics=config.log_stats,
        max_steps_in_flight=max(1 + config.scheduler.async_scheduling, config.parallel.steps_ahead),
        pipeline_stages=config.parallel.steps_ahead,
        num_speculative_tokens=0 if speculation is None else speculation.num_speculative_tokens,
        drafter=None if speculation is None else _drafter_config(speculation),
    )


def _drafter_config(speculation: SpeculationConfig) -> _core.DrafterConfig:
    return _core.DrafterConfig(
        method=speculation.method,
        prompt_lookup_min=speculation.prompt_lookup_min,
        prompt_lookup_max=speculation.prompt_lookup_max,
        suffix_decoding_max_tree_depth=speculation.suffix_decoding_max_tree_depth,
        suffix_decoding_max_spec_factor=speculation.suffix_decoding_max_spec_factor,
        suffix_decoding_min_token_prob=speculation.suffix_decoding_min_token_prob,
        suffix_decoding_max_cached_requests=speculation.suffix_decoding_max_cached_requests,
        caps=[(first, last, num_tokens) for first, last, num_tokens in speculation.caps],
        adaptive=speculation.adaptive,
    )


class _Stopwatch:
    """Notes how long one thing after another took."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._began = monotonic_ns()

    def ended(self, name: str) -> None:
        """What began with the end of the thing before it has ended."""
        now = monotonic_ns()
        self._seconds[name] = (now - self._began) / 1e9
        self._began = now
