"""``EngineCore.step``: schedule → execute → update, the main loop of the whole engine.

Rust decides what runs (``scheduler``), Python computes it (``executor``). One thread steps an EngineCore; requests
come in and outputs leave through ``handle`` from any thread.
"""

from typing import TYPE_CHECKING

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.exceptions import EngineDeadError
from rustvllm.logger import init_logger

if TYPE_CHECKING:
    from rustvllm.executor.interface import Executor

logger = init_logger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
"""Steps that may fail in a row before the engine counts as broken (a GPU does not recover from every error)."""


class EngineCore:
    """The scheduler and the executor of one model.

    Attributes:
        scheduler: Owner's side of the Rust core; only the thread that steps may touch it.
        executor: Runs the model.
        handle: Shared side of the Rust core, for any thread.
        num_blocks: KV blocks, the null block included.
        num_cpu_blocks: KV blocks in CPU memory for preempted requests.
        last_step_error: What the last failed step raised, as text; None if none failed.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and take the memory of the KV cache.

        Raises:
            ModelLoadError: The weights cannot be read or do not fit the configuration.
            ConfigError: The KV cache cannot hold one request of ``max_model_len`` tokens, or there is not as much
                memory as ``swap_space`` says.
        """
        self.config = config
        self.executor = _make_executor(config)
        self.executor.load_model()
        self.num_blocks = self.executor.determine_num_blocks()
        config.check_num_blocks(self.num_blocks)
        self.num_cpu_blocks = self.executor.determine_num_cpu_blocks(self.num_blocks)
        scheduler_config = _core.SchedulerConfig(
            num_blocks=self.num_blocks,
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
            scheduling_policy="priority" if config.scheduler.scheduling_policy == "priority" else "fcfs",
            max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
            watermark=config.scheduler.watermark,
            preemption_mode=config.scheduler.preemption_mode,
            num_cpu_blocks=self.num_cpu_blocks,
            preemption_immunity_steps=config.scheduler.preemption_immunity_steps,
            max_look_past=config.scheduler.max_look_past,
            max_times_passed=config.scheduler.max_times_passed,
            hash_algorithm=config.cache.hash_algorithm,
        )
        step_buffers = self.executor.initialize_kv_cache(
            self.num_blocks,
            _core.step_buffer_spec(scheduler_config),
            scheduler_config.num_buffer_sets,
            self.num_cpu_blocks,
        )
        self.scheduler = _core.Scheduler(scheduler_config, step_buffers)
        self.executor.bind_token_ids(self.scheduler.token_ids)
        self.handle = self.scheduler.handle
        self.last_step_error: str | None = None
        self._failures_in_a_row = 0

    def step(self) -> int:
        """Run one step: what the scheduler planned, through the model, back into the scheduler.

        A step whose execution raises ends its own requests with an error and nobody else's.

        Returns:
            Tokens that were run; 0 when nothing can run.

        Raises:
            EngineDeadError: Several steps in a row failed.
        """
        output = self.scheduler.schedule()
        if output is None:
            return 0
        try:
            self.executor.execute_model(output)
            sampled = self.executor.sample_tokens(None)
        except BaseException as error:  # noqa: BLE001 -- what is no Exception is raised again
            self._fail_step(output, error)
        else:
            self._failures_in_a_row = 0
            self.scheduler.update_from_output(output, sampled.sampled_token_ids, logprobs=sampled.logprobs)
        return output.total_num_scheduled_tokens

    def _fail_step(self, output: _core.SchedulerOutput, error: BaseException) -> None:
        self.last_step_error = f"{type(error).__name__}: {error}"
        self.executor.discard_step()
        self.scheduler.fail_step(output)
        if not isinstance(error, Exception):  # Ctrl-C and the like go on to the caller
            raise error
        logger.error("step %d of %d requests failed", output.step, output.num_reqs, exc_info=error)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            raise EngineDeadError(
                f"{self._failures_in_a_row} steps in a row failed, the last with {self.last_step_error}"
            ) from error

    def shutdown(self) -> None:
        """Give back the executor's memory. The core must not be stepped again."""
        self.executor.shutdown()


def _make_executor(config: EngineConfig) -> "Executor":
    """Imported here: torch takes seconds, and a wrong configuration is refused before it; a simulation needs none."""
    if config.sim is not None:
        from rustvllm.executor.sim import SimExecutor

        return SimExecutor(config, config.sim)
    from rustvllm.executor.uniproc import UniProcExecutor

    return UniProcExecutor(config)
