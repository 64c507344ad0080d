"""``LLMEngine``: an engine in the caller's own process and thread, one ``step`` at a time."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rustvllm.config import EngineConfig, UsageContext
from rustvllm.engine.configured import ConfiguredEngine
from rustvllm.engine.core_client.inproc import InprocClient
from rustvllm.engine.front_tracer import make_front_tracer
from rustvllm.engine.input_processor import InputProcessor
from rustvllm.engine.request.core_request import EngineCoreRequest, arrival_ns_of
from rustvllm.engine.request.prompts import PromptType, with_tokenization
from rustvllm.engine.request_table import RequestTable
from rustvllm.engine.unbuilt import METHODS, check_arguments
from rustvllm.exceptions import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError
from rustvllm.lora.registry import AdapterRegistry, distinct
from rustvllm.lora.request import LoRARequest
from rustvllm.observe.metrics.counters import Metric, read_metrics
from rustvllm.observe.metrics.families import as_metrics
from rustvllm.observe.metrics.stat_logger import LoggingStatLogger, StatLoggerFactory
from rustvllm.observe.metrics.stat_reporter import StatReporter, checked_factories
from rustvllm.observe.trace.request_spans import EXIT_SECONDS
from rustvllm.observe.trace.sinks import make_tracer
from rustvllm.observe.trace.startup_records import load_tokenizer
from rustvllm.observe.trace.tracer import StatusCallback, Tracer
from rustvllm.outputs import RequestOutput
from rustvllm.parameter_checks import check_bool, refuse_attribute
from rustvllm.sampling_params import PoolingParams, SamplingParams
from rustvllm.tenant import Tenant

if TYPE_CHECKING:
    from rustvllm.config.engine_args import EngineArgs

_MAX_IDLE_STEPS = 3


class LLMEngine(ConfiguredEngine):
    """Requests in, outputs out, under the caller's control; ``LLM`` is the comfortable form.

    Always step from one thread: the first that does owns the scheduler.

    Attributes:
        config: What the engine was built from.
        tokenizer: None with ``skip_tokenizer_init``.
        input_processor: Checks requests.
        engine_core: Drives the engine.
        adapters_of_waiting: Numbers of the adapters of requests that are made and not added yet, which keep them.
    """

    def __init__(
        self,
        config: EngineConfig,
        tracer: Tracer | None = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        *,
        on_status_change: StatusCallback | None = None,
    ) -> None:
        """Load the model.

        Args:
            config: What engine.
            stat_loggers: What makes :class:`~rustvllm.observe.metrics.stat_logger.StatLogger`.
            tracer: Takes records of what happens; None: a tracer made from ``config.tracing``.
            on_status_change: Called with ``(request_id, old, new)`` for each change of a request's status, by its
                tracer; see :class:`~rustvllm.llm.LLM`. Not with ``tracer``, which may have it as a sink.

        Raises:
            ModelLoadError: Weights or tokenizer cannot be read.
            ConfigError: The KV cache is too small, the trace file cannot be written, or OpenTelemetry is not installed.
        """
        factories = checked_factories(stat_loggers)
        if tracer is None:
            overlap = config.scheduler.async_scheduling
            tracer = make_tracer(
                config.tracing, "LLM", owns_file=True, has_overlap=overlap, on_status_change=on_status_change
            )
        self._tracer = make_front_tracer(tracer, config, "LLMEngine")
        self.tokenizer = load_tokenizer(config, tracer)
        if tracer is not None:
            tracer.note("engine_client", "in this thread")
        self.engine_core = InprocClient(config, tracer)
        self.config = config.with_max_model_len(self.engine_core.max_model_len)
        self.input_processor = InputProcessor(self.config, self.tokenizer)
        core_tokenizer = None if self.tokenizer is None else self.tokenizer.core
        interval = config.scheduler.stream_interval
        self._requests = RequestTable(self.engine_core, core_tokenizer, self._tracer, "LLMEngine", interval)
        self._adapters = AdapterRegistry(
            self.config.lora, self.config.model.served_model_name, self.config.load.download_dir
        )
        self._retired_adapters: set[int] = set()  # no name has them any more, requests may
        self.adapters_of_waiting: Callable[[], set[int]] = set
        self._idle_steps = 0
        handle = self.engine_core.handle
        self._reporter: StatReporter | None = None
        if factories:
            self._reporter = StatReporter(lambda: read_metrics(handle, 0.0), factories, self.config)
            self._reporter.start()
            weakref.finalize(self, self._reporter.stop).atexit = False
        self._stats_line = StatReporter(lambda: read_metrics(handle, 0.0), (LoggingStatLogger,), self.config)
        self._stats_line.look()

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> "LLMEngine":
        """Build an engine from a finished configuration."""
        return cls(config)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: UsageContext = "llm_class",  # noqa: ARG003 -- vLLM's signature; the configuration is finished
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        disable_log_stats: bool = False,  # noqa: ARG003 -- nothing is logged unless do_log_stats is called
    ) -> "LLMEngine":
        """Build an engine from a finished configuration, with vLLM's arguments."""
        return cls(vllm_config, stat_loggers=stat_loggers)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: "EngineArgs",
        usage_context: UsageContext = "llm_class",
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_multiprocessing: bool = False,
    ) -> "LLMEngine":
        """Build an engine from engine arguments.

        Raises:
            ConfigError: An argument is wrong, or ``enable_multiprocessing`` is True.
            ModelLoadError: The model cannot be found or read.
        """
        if enable_multiprocessing:
            raise ConfigError(
                "enable_multiprocessing is not supported yet: an LLMEngine runs in its caller's thread; "
                "AsyncLLM(config, multiprocess=True) runs in a process of its own"
            )
        return cls(engine_args.create_engine_config(usage_context), stat_loggers=stat_loggers)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | EngineCoreRequest,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        *,
        tenant: Tenant | None = None,
        **unbuilt: Any,
    ) -> str:
        """Queue a request; the next :meth:`step` may run it.

        Args:
            request_id: Not in use by a running request.
            prompt: Text, token ids or a dict; or what ``input_processor.process`` returned.
            params: None for the model's own defaults.
            arrival_time: When it came, in seconds of ``time.time``; None: now. Its latencies count from then.
            lora_request: Its adapter, which is loaded if it is not yet; None: the model alone.
            tokenization_kwargs: ``{"add_special_tokens": False}`` leaves the tokenizer's own special tokens out of a
                text prompt; other keys are refused.
            trace_headers: W3C trace context (``traceparent``, ``tracestate``) whose part the request is.
            priority: Lower is sooner, with the priority policy.
            tenant: Whose share of the engine it is charged to, with the fair policy.
            unbuilt: Other arguments of vLLM, which must be None.

        Returns:
            ``request_id``.

        Raises:
            InvalidRequestError: The request is wrong; the engine is as before.
            QueueFullError: ``max_num_queued_reqs`` requests or ``max_num_queued_tokens`` tokens are waiting.
            EngineDeadError: The engine was shut down.
        """
        self.engine_core.check_alive()
        if unbuilt:
            check_arguments("LLMEngine.add_request", unbuilt)
        if not isinstance(prompt, EngineCoreRequest):
            if tokenization_kwargs:
                [prompt] = with_tokenization([prompt], tokenization_kwargs)
            prompt = self.input_processor.process(prompt, params, priority, tenant=tenant)
        if lora_request is not None:
            number = self.load_adapters([lora_request])[0]
            prompt = replace(prompt, adapter=number, lora_request=lora_request)
        if arrival_time is not None:
            prompt = replace(prompt, arrival_ns=arrival_ns_of(arrival_time))
        self._requests.add(request_id, prompt, trace_headers=trace_headers)
        return request_id

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; requests name it by the same ``LoRARequest``.

        Returns:
            True; one that is loaded stays as it is, unless ``load_inplace`` asks for its folder to be read again.

        Raises:
            InvalidRequestError: It cannot be served; the message says why.
        """
        self.load_adapters([lora_request])
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapter of this ``lora_int_id``; requests under way keep it to their end. False: there is none."""
        taken = self._adapters.take_out(lora_id)
        if taken is not None:
            self._retire(taken.number)
        return taken is not None

    def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of every adapter that is loaded."""
        return {request.lora_int_id for request in self._adapters.requests()}

    def load_adapters(self, requests: Sequence[LoRARequest | None]) -> list[int]:
        """Load what is not loaded yet; the number of each request's adapter for its engine, 0 where it is None.

        Raises:
            InvalidRequestError: One cannot be served, or there are more than ``max_cpu_loras``.
        """
        self.engine_core.check_alive()
        numbers: dict[str, int] = {}
        for request in distinct(requests):
            numbers[request.lora_name] = self._load_adapter(request, set(numbers.values()))
        return [0 if request is None else numbers[request.lora_name] for request in requests]

    def _load_adapter(self, request: LoRARequest, keep: set[int]) -> int:
        self._retire()
        found = self._adapters.find(request)
        if found is not None:
            return found.number
        folder = self._adapters.check(request)
        crowded_out = self._adapters.crowded_out(self._adapters_in_use() | keep)
        if crowded_out is not None:
            self._adapters.forget(crowded_out)
            self._retire(crowded_out.number)
        number = self._adapters.new_number()
        try:
            self.engine_core.core.executor.add_adapter(number, request.lora_name, folder)
        except (ModelLoadError, ConfigError) as error:
            raise InvalidRequestError(str(error), "lora_request") from error
        before = self._adapters.put(replace(request, lora_path=folder, load_inplace=False), number)
        if before is not None:
            self._retire(before.number)
        return number

    def _retire(self, *numbers: int) -> None:
        """Have the engine forget adapters without a name as soon as no request needs them."""
        self._retired_adapters.update(numbers)
        for number in self._retired_adapters - self._adapters_in_use():
            self._retired_adapters.discard(number)
            self.engine_core.core.executor.remove_adapter(number)

    def _adapters_in_use(self) -> set[int]:
        return self._requests.adapters_in_use() | self.adapters_of_waiting()

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine.

        Returns:
            The outputs that changed in this step; ``finished`` on each. Empty while prompts are being read, and when
            nothing is left to do.

        Raises:
            EngineDeadError: The engine was shut down, or is broken.
        """
        num_tokens = self.engine_core.step()
        changed = self._requests.poll()
        if num_tokens or changed or not self._requests or self.engine_core.is_compiling():
            self._idle_steps = 0
        else:
            self._idle_steps += 1
            if self._idle_steps >= _MAX_IDLE_STEPS:  # never spin for ever if the scheduler runs no request
                raise EngineDeadError(f"{len(self._requests)} requests wait and the scheduler runs none of them")
        return [state.take() for state in changed if state.ready]

    def abort_request(self, request_id: str | Sequence[str], internal: bool = False) -> None:  # noqa: ARG002 -- vLLM's signature
        """End requests; the next :meth:`step` returns their last outputs, ``finish_reason`` ``abort``. Idempotent."""
        self.engine_core.check_alive()
        self._requests.abort(request_id)

    def abort_all(self) -> None:
        """End every request and wait until the engine holds none; what they gave is dropped."""
        for state in self._requests.states():
            self._requests.forget(state, abort=True)
        while self.has_unfinished_requests():
            self.engine_core.step()
            self._requests.poll()

    def get_num_unfinished_requests(self) -> int:
        """Requests that were added and are still without their last output."""
        return len(self._requests)

    def num_unfinished_samples(self) -> int:
        """Requests the engine itself has to finish: n for each request with n samples."""
        return self._requests.num_samples

    def has_unfinished_requests(self) -> bool:
        """True while :meth:`step` has something to do."""
        self.engine_core.check_alive()
        # The scheduler may hold an aborted request a moment longer than this front end does.
        return bool(self._requests) or self.engine_core.has_unfinished_requests()

    def get_metrics(self) -> list[Metric]:
        """All that was counted, as ``/metrics`` of a server has it (``docs/metrics.md``)."""
        names = self.config.model.served_model_name or (self.config.model.model,)
        return as_metrics(read_metrics(self.engine_core.handle, 0.0), self.config, names[0])

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:  # noqa: ARG002 -- vLLM's signature
        """Forget what the prefix cache holds.

        Args:
            reset_running_requests: Take the blocks of running requests, too; these are computed again.
            reset_connector: No effect: there is none.

        Returns:
            Whether all was forgotten: not while blocks are in use.

        Raises:
            InvalidRequestError: ``reset_running_requests`` is not True or False.
            EngineDeadError: The engine was shut down.
        """
        check_bool("reset_running_requests", reset_running_requests)
        return self.engine_core.scheduler.reset_prefix_cache(preempt_running=reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Do nothing: images are processed anew for each request; ``docs/vision.md`` says what the worker keeps."""

    def reset_encoder_cache(self) -> None:
        """Do nothing: models have no encoder, so no cache of its outputs exists."""

    def is_sleeping(self) -> bool:
        """False: an engine cannot sleep."""
        return False

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the engine does: ``generate``, ``embed`` or ``classify``."""
        return (self.config.model.task,)

    def do_log_stats(self) -> None:
        """Log a line of what the engine did since the last call, or since its start; none if it did nothing.

        The ``stat_loggers`` receive their statistics, too, without waiting for the end of their interval.
        """
        self.engine_core.check_alive()
        self._stats_line.tell()
        if self._reporter is not None:
            self._reporter.tell()

    def shutdown(self) -> None:
        """Free the model and its memory; idempotent. Any later use raises EngineDeadError."""
        if self._reporter is not None:
            self._reporter.stop()
        self.engine_core.shutdown()
        if self._tracer is not None:
            self._tracer.close(EXIT_SECONDS)

    def __getattr__(self, name: str) -> Any:
        """Say of what is not built yet that it is not, in place of a bare name."""
        refuse_attribute(self, name, METHODS)
