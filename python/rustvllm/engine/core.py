"""``EngineCore.step``: schedule → execute → update, the main loop of the whole engine.

Rust decides what runs (``scheduler``), Python computes it (``executor``). One thread steps an EngineCore; requests
come in and outputs leave through ``handle`` from any thread.

With ``async_scheduling`` two steps overlap: one is planned and launched while the device computes the one before it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, NoReturn

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.engine.step_times import StepObserver, StepTimes
from rustvllm.engine.step_trace import StepTrace
from rustvllm.engine.step_tracer import StepTracer, note_load
from rustvllm.exceptions import EngineDeadError
from rustvllm.logger import init_logger
from rustvllm.tracing import Tracer

if TYPE_CHECKING:
    from rustvllm.executor.interface import Executor
    from rustvllm.worker.step_output import AsyncModelRunnerOutput

logger = init_logger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
"""Steps that may fail in a row before the engine counts as broken (a GPU does not recover from every error)."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose samples have not been taken in; times as in :class:`StepTimes`."""

    output: _core.SchedulerOutput
    sampled: "AsyncModelRunnerOutput"
    schedule_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    launched_ns: int


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """The samples of a step that raised while it was launched."""

    error: BaseException

    def is_done(self) -> bool:
        """There is nothing to wait for."""
        return True

    def get_output(self) -> NoReturn:
        """Raise what the launch raised."""
        raise self.error


class EngineCore:
    """The scheduler and the executor of one model.

    Attributes:
        scheduler: Owner's side of the Rust core; only the thread that steps may touch it.
        executor: Runs the model.
        handle: Shared side of the Rust core, for any thread.
        num_blocks: KV blocks, the null block included.
        num_cpu_blocks: KV blocks in CPU memory for preempted requests.
        max_concurrent_batches: Steps that may be launched and not taken in.
        last_step_error: What the last failed step, or a logits processor of single requests, raised, as text; None if
            none did.
        startup_phases: Seconds that each part of the constructor took, by its name, in order.
        on_step_error: Called with that text, before anybody is told that a request failed.
        step_observers: Called with the times of each step when it has ended.
        tracer: Is told of every step and request; None: nobody is.
        step_tracer: Tells it.
        has_clients: Requests come from other processes: the scheduler knows them as ``id@client``.
    """

    def __init__(self, config: EngineConfig, tracer: Tracer | None = None, *, has_clients: bool = False) -> None:
        """Load the model and take the memory of the KV cache.

        Args:
            config: What engine.
            tracer: Is told of every step and request; None: nobody is.
            has_clients: Requests come from other processes.

        Raises:
            ModelLoadError: The weights cannot be read or do not fit the configuration.
            ConfigError: The KV cache cannot hold one request of ``max_model_len`` tokens, there is not as much
                memory as ``swap_space`` says, or the step trace cannot be written.
        """
        self.config = config
        self.has_clients = has_clients
        self.startup_phases: dict[str, float] = {}
        phase = _Stopwatch(self.startup_phases)
        self.step_observers: list[StepObserver] = []
        self._trace = None if config.step_trace_file is None else StepTrace(config.step_trace_file)
        if self._trace is not None:
            self.step_observers.append(self._trace.record)
        self.executor = _make_executor(config)
        phase.ended("executor")
        self.executor.load_model()
        phase.ended("load model")
        self.num_blocks = self.executor.determine_num_blocks()
        phase.ended("measure memory")
        config = self._settle_max_model_len(config)
        config.check_num_blocks(self.num_blocks)
        self.num_cpu_blocks = self.executor.determine_num_cpu_blocks(self.num_blocks)
        self.max_concurrent_batches = 2 if config.scheduler.async_scheduling else 1
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
            max_num_queued_tokens=config.scheduler.max_num_queued_tokens,
            queue_timeout=config.scheduler.queue_timeout,
            watermark=config.scheduler.watermark,
            preemption_mode=config.scheduler.preemption_mode,
            num_cpu_blocks=self.num_cpu_blocks,
            preemption_immunity_steps=config.scheduler.preemption_immunity_steps,
            max_look_past=config.scheduler.max_look_past,
            max_times_passed=config.scheduler.max_times_passed,
            hash_algorithm=config.cache.hash_algorithm,
            collect_metrics=config.log_stats,
            max_steps_in_flight=self.max_concurrent_batches,
        )
        step_buffers = self.executor.initialize_kv_cache(
            self.num_blocks,
            _core.step_buffer_spec(scheduler_config),
            scheduler_config.num_buffer_sets,
            self.num_cpu_blocks,
        )
        self.scheduler = _core.Scheduler(scheduler_config, step_buffers)
        self.executor.bind_token_ids(self.scheduler.token_ids, self.scheduler.sampling_extras)
        phase.ended("KV cache")
        self.executor.warm_up()
        phase.ended("warm-up")
        self.handle = self.scheduler.handle
        self.last_step_error: str | None = None
        self.on_step_error: Callable[[str], object] = lambda _: None
        self._launched: deque[LaunchedStep] = deque()
        self._failures_in_a_row = 0
        self.tracer: Tracer | None = None
        self.step_tracer: StepTracer | None = None
        if tracer is not None:
            note_load(tracer, self.startup_phases)
            self.trace_to(tracer)

    def trace_to(self, tracer: Tracer | None) -> None:
        """Tell a tracer of every step and request from the next step on, in place of the one before; None: nobody.

        Not while another thread steps.
        """
        if (before := self.step_tracer) is not None:
            # A new list: the old one may be being walked through.
            self.step_observers = [each for each in self.step_observers if each != before.observe]
            before.end()
        self.tracer, self.step_tracer = tracer, None
        if tracer is not None:
            self.step_tracer = StepTracer(self.scheduler, tracer, has_clients=self.has_clients)
            self.step_observers = [*self.step_observers, self.step_tracer.observe]

    def _settle_max_model_len(self, config: EngineConfig) -> EngineConfig:
        """The configuration whose ``max_model_len`` the KV cache can hold, if it was left to the engine."""
        self.config = config.fitted(self.num_blocks)
        longest, asked = self.config.model.max_model_len, config.model.max_model_len
        if longest < asked:
            logger.info("max_model_len is %d, what the KV cache holds; the model was made for %d", longest, asked)
        return self.config

    def step(self) -> int:
        """Plan a step and launch it; take in what the oldest launched one sampled, once no further one may run.

        A step that raises ends with an error its own requests and those of the step planned behind it, nobody else's.

        Returns:
            Tokens of the step that was launched, or else of the one that was taken in; 0 when nothing can run.

        Raises:
            EngineDeadError: Several steps in a row failed.
        """
        num_tokens = 0
        if self.step_tracer is not None:
            self.step_tracer.begin()
        if len(self._launched) < self.max_concurrent_batches:
            schedule_ns = monotonic_ns()
            if (output := self.scheduler.schedule()) is not None:
                num_tokens = output.total_num_scheduled_tokens
                launched = self._launch(output, schedule_ns)
                self._launched.append(launched)
                if len(self._launched) < self.max_concurrent_batches and not launched.sampled.is_done():
                    return num_tokens  # the next one is planned while it runs
        if self._launched:
            num_tokens = num_tokens or self._launched[0].output.total_num_scheduled_tokens
            self._take_in()
            while self._launched and isinstance(self._launched[-1].sampled, FailedLaunch):
                self._take_in()  # nothing is planned behind it, only to fail with it
        return num_tokens

    def _launch(self, output: _core.SchedulerOutput, schedule_ns: int) -> LaunchedStep:
        prepare_ns, sample_ns = monotonic_ns(), 0
        sampled: AsyncModelRunnerOutput
        try:
            self.executor.execute_model(output)
            sample_ns = monotonic_ns()
            sampled = self.executor.sample_tokens(None)
        except BaseException as error:  # noqa: BLE001 -- steps end in order: it is raised when this one's turn has come
            sampled = FailedLaunch(error)
        launched_ns = monotonic_ns()
        # One that failed on its way has no later beginnings of its own.
        sample_ns = sample_ns or launched_ns
        forward_ns = min(max(self.executor.forward_ns, prepare_ns), sample_ns)
        return LaunchedStep(output, sampled, schedule_ns, prepare_ns, forward_ns, sample_ns, launched_ns)

    def _take_in(self) -> None:
        """Wait for the oldest step and give the scheduler what it sampled."""
        step = self._launched.popleft()
        output = step.output
        try:
            sampled = step.sampled.get_output()
        except BaseException as error:  # noqa: BLE001 -- what is no Exception is raised again
            done_ns = monotonic_ns()
            self._fail_step(output, error)
        else:
            done_ns = monotonic_ns()
            self._failures_in_a_row = 0
            if sampled.row_error is not None:
                self.last_step_error = sampled.row_error
                self.on_step_error(sampled.row_error)  # before the outputs that it explains
            self.scheduler.update_from_output(
                output, sampled.sampled_token_ids, logprobs=sampled.logprobs, prompt_logprobs=sampled.prompt_logprobs
            )
            if self.config.log_stats:
                self.scheduler.record_step_times(
                    step.schedule_ns, step.prepare_ns, step.forward_ns, step.sample_ns, step.launched_ns, done_ns
                )
        if self.step_observers:
            self._observe(step, done_ns)

    def _observe(self, step: LaunchedStep, done_ns: int) -> None:
        times = StepTimes(
            step=step.output.step,
            schedule_ns=step.schedule_ns,
            prepare_ns=step.prepare_ns,
            forward_ns=step.forward_ns,
            sample_ns=step.sample_ns,
            launched_ns=step.launched_ns,
            done_ns=done_ns,
            end_ns=monotonic_ns(),
            num_tokens=step.output.total_num_scheduled_tokens,
            num_reqs=step.output.num_reqs,
        )
        for observe in self.step_observers:
            observe(times)

    def _fail_step(self, output: _core.SchedulerOutput, error: BaseException) -> None:
        """End the requests of a step, and of what was launched behind it: that reads what this one did not write."""
        errors = [error, *(step.sampled.error for step in self._launched if isinstance(step.sampled, FailedLaunch))]
        self._launched.clear()
        self.last_step_error = f"{type(error).__name__}: {error}"
        self.on_step_error(self.last_step_error)  # before the outputs that it explains
        self.executor.discard_step()
        self.scheduler.fail_step(output)
        for each in errors:
            if not isinstance(each, Exception):  # Ctrl-C and the like go on to the caller
                raise each
        logger.error("step %d of %d requests failed", output.step, output.num_reqs, exc_info=error)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            raise EngineDeadError(
                f"{self._failures_in_a_row} steps in a row failed, the last with {self.last_step_error}"
            ) from error

    def has_unfinished_requests(self) -> bool:
        """True while the scheduler holds a request, or a step runs."""
        return bool(self._launched) or self.scheduler.has_unfinished_requests()

    def flush_trace(self) -> None:
        """Write the step trace as far as it goes, and tell the tracer what happened outside of steps."""
        if self.step_tracer is not None:
            self.step_tracer.flush()
        if self._trace is not None:
            self._trace.flush()

    def shutdown(self) -> None:
        """Give back the executor's memory. The core must not be stepped again."""
        if self._launched:
            self._launched.clear()
            self.executor.discard_step()
        if self._trace is not None:
            self._trace.close()
        self.executor.shutdown()


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


def _make_executor(config: EngineConfig) -> "Executor":
    """Imported here: torch takes seconds, and a wrong configuration is refused before it; a simulation needs none."""
    if config.sim is not None:
        from rustvllm.executor.sim import SimExecutor

        return SimExecutor(config, config.sim)
    from rustvllm.executor.uniproc import UniProcExecutor

    return UniProcExecutor(config)
