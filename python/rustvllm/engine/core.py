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
from rustvllm.engine.grammar_masks import GrammarMasks
from rustvllm.engine.start import start_engine
from rustvllm.exceptions import DeviceFailedError, EngineDeadError
from rustvllm.logger import init_logger
from rustvllm.observe.engine_watch import EngineWatch
from rustvllm.observe.steps.times import StepTimes
from rustvllm.observe.steps.trace_file import StepTrace
from rustvllm.observe.trace.step_tracer import note_load
from rustvllm.observe.trace.tracer import Tracer

if TYPE_CHECKING:
    from rustvllm.worker.step_output import AsyncModelRunnerOutput

logger = init_logger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
"""Steps that may fail in a row before the engine counts as broken (a GPU does not recover from every error)."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that executes, or has, and whose samples the scheduler does not have yet."""

    output: _core.SchedulerOutput
    sampled: "AsyncModelRunnerOutput"
    times: StepTimes


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
        watch: Tells traces, metrics and the live page of each step.
        num_blocks: KV blocks, the null block included.
        num_cpu_blocks: KV blocks in CPU memory for preempted requests.
        is_frozen: A pause keeps all requests from running, and from getting tokens that grammars force.
        max_concurrent_batches: Steps that may be launched and not updated.
        last_step_error: What the last failed step, or a logits processor of single requests, raised, as text; None if
            none did.
        startup_phases: Seconds that each part of the start took, by its name, in order.
        on_step_error: Called with that text, before any request is known to have failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        tracer: Tracer | None = None,
        *,
        has_clients: bool = False,
        node_secret: bytes | None = None,
    ) -> None:
        """Load the model and take the memory of the KV cache.

        Args:
            config: What engine.
            tracer: Gets a record of every step and request; None disables tracing.
            has_clients: Requests come from other processes.
            node_secret: What other nodes of the model must know; None: as the environment says.

        Raises:
            ModelLoadError: The weights cannot be read or do not fit the configuration.
            ConfigError: The KV cache cannot hold one request of ``max_model_len`` tokens, there is not as much
                memory as ``swap_space`` says, or the step trace cannot be written.
        """
        step_trace = None if config.step_trace_file is None else StepTrace(config.step_trace_file)
        started = start_engine(config, node_secret)
        self.config, self.executor, self.scheduler = started.config, started.executor, started.scheduler
        self.num_blocks, self.num_cpu_blocks = started.num_blocks, started.num_cpu_blocks
        self.startup_phases = started.phases
        self.is_frozen = False
        self.max_concurrent_batches = self.scheduler.config.max_steps_in_flight
        self.handle = self.scheduler.handle
        self.executor.watch(self.handle.wake)
        self._grammars = GrammarMasks(self.config, self.scheduler)
        self.watch = EngineWatch(self.scheduler, step_trace, has_clients=has_clients)
        self.last_step_error: str | None = None
        self.on_step_error: Callable[[str], object] = lambda _: None
        self._launched: deque[LaunchedStep] = deque()
        self._failures_in_a_row = 0
        if tracer is not None:
            note_load(tracer, self.startup_phases)
            self.watch.trace_to(tracer)

    def step(self) -> int:
        """Schedule a step and have it executed; update the scheduler with the oldest one once no further one may run.

        A step that raises ends with an error its own requests and those of the step planned after it, and no others.

        Returns:
            Tokens of the step that was launched, or else of the one that was updated; 0 when nothing can run.

        Raises:
            EngineDeadError: Several steps in a row failed, or the device did for good.
        """
        num_tokens = 0
        self._check_executor()
        self.watch.begin_step()
        if len(self._launched) < self.max_concurrent_batches:
            schedule_ns = monotonic_ns()
            is_one_held = False
            if not self.is_frozen:
                self._grammars.look_ahead()
                is_one_held = self._grammars.hold_slow()
            output = self.scheduler.schedule()
            if output is None and is_one_held and not self._launched:
                self._grammars.release_slow()
                output = self.scheduler.schedule()
            self._grammars.take_news()
            if output is not None:
                num_tokens = output.total_num_scheduled_tokens
                launched = self._execute(output, schedule_ns)
                if launched is None:
                    return num_tokens
                self._launched.append(launched)
                if len(self._launched) < self.max_concurrent_batches and not launched.sampled.is_done():
                    return num_tokens  # the next one is planned while it runs
        if self._launched:
            num_tokens = num_tokens or self._launched[0].output.total_num_scheduled_tokens
            self._update()
            while self._launched and isinstance(self._launched[-1].sampled, FailedLaunch):
                self._update()  # no step is planned after it, only to fail with it
        return num_tokens

    def _execute(self, output: _core.SchedulerOutput, schedule_ns: int) -> LaunchedStep | None:
        """Launch the forward pass and the sampling of a step; None when it failed with the one before it.

        What a grammar allows depends on the token before. So the samples of the step before are awaited between the
        two where a grammar is obeyed: the device computes meanwhile, and so do the threads that make masks.
        """
        times = StepTimes(output.step, schedule_ns, output.total_num_scheduled_tokens, output.num_reqs, monotonic_ns())
        sampled: AsyncModelRunnerOutput
        try:
            self._grammars.begin(output)
            self.executor.execute_model(output)
            times.sample_ns = monotonic_ns()
        except BaseException as error:  # noqa: BLE001 -- steps end in order: it is raised when this one's turn has come
            sampled = FailedLaunch(error)
        else:
            if output.num_structured_output_reqs and not self._update_launched():
                return None
            sampled = self._sample(output)
        times.end_launch(self.executor.forward_ns, self.executor.tower_ns)
        return LaunchedStep(output, sampled, times)

    def _check_executor(self) -> None:
        try:
            self.executor.check()
        except DeviceFailedError as error:
            raise EngineDeadError(str(error)) from error

    def _sample(self, output: _core.SchedulerOutput) -> "AsyncModelRunnerOutput":
        """Launch the sampling of the step that was executed."""
        try:
            return self.executor.sample_tokens(self._grammars.of_step(output, self.executor.forward_ns_left))
        except BaseException as error:  # noqa: BLE001 -- as above
            return FailedLaunch(error)

    def _update_launched(self) -> bool:
        """Update the steps that were launched; False when one failed, and with it what was planned after it."""
        return all(self._update() for _ in range(len(self._launched)))

    def _update(self) -> bool:
        """Wait for the oldest step and give the scheduler what it sampled; False when it failed."""
        step = self._launched.popleft()
        output, times = step.output, step.times
        try:
            sampled = step.sampled.get_output()
        except BaseException as error:  # noqa: BLE001 -- what is not an Exception is raised again
            times.done_ns = monotonic_ns()
            self._fail_step(output, error)
            self.watch.end_step(times)
            return False
        else:
            times.done_ns = monotonic_ns()
            self._failures_in_a_row = 0
            if sampled.row_error is not None:
                self.last_step_error = sampled.row_error
                self.on_step_error(sampled.row_error)  # before the outputs that it explains
            self.scheduler.update_from_output(
                output,
                sampled.sampled_token_ids,
                logprobs=sampled.logprobs,
                prompt_logprobs=sampled.prompt_logprobs,
                pooled=sampled.pooled,
            )
            if self.config.log_stats:
                self.scheduler.record_step_times(*times.until_done())
        self.watch.end_step(times)
        return True

    def _fail_step(self, output: _core.SchedulerOutput, error: BaseException) -> None:
        """End the requests of a step, and of what was launched after it: that reads what this one did not write."""
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
        for each in errors:
            if isinstance(each, DeviceFailedError):
                raise EngineDeadError(str(each)) from each
        if self._failures_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            raise EngineDeadError(
                f"{self._failures_in_a_row} steps in a row failed, the last with {self.last_step_error}"
            ) from error

    def has_unfinished_requests(self) -> bool:
        """True while the scheduler holds a request, or a step runs."""
        return bool(self._launched) or self.scheduler.has_unfinished_requests()

    def shutdown(self) -> None:
        """Give back the executor's memory. The core must not be stepped again."""
        if self._launched:
            self._launched.clear()
            self.executor.discard_step()
        self.watch.close()
        self.executor.shutdown()
