"""``AsyncLLM``: an engine that runs by itself, in a thread or a process, behind an asyncio interface.

How its outputs reach their readers: ``output_handler``.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rustvllm import _core, envs
from rustvllm.config import EngineConfig, UsageContext
from rustvllm.engine.async_state import STATS_TIMEOUT, AsyncState
from rustvllm.engine.core_client.choice import make_client
from rustvllm.engine.core_client.interface import AsyncEngineClient
from rustvllm.engine.core_client.remote import RemoteClient
from rustvllm.engine.core_client.thread import ThreadClient
from rustvllm.engine.front_tracer import make_front_tracer
from rustvllm.engine.input_processor import InputProcessor
from rustvllm.engine.output_handler import OutputHandler
from rustvllm.engine.pausing import PauseOrders
from rustvllm.engine.request.core_request import EngineCoreRequest, arrival_ns_of
from rustvllm.engine.request.prompts import PromptType, with_tokenization
from rustvllm.engine.request.state import EventSink, RequestState
from rustvllm.engine.request.stream import RequestStream
from rustvllm.engine.request_table import MAX_IMAGE_BYTES, SAMPLES_AT_ONCE, RequestTable
from rustvllm.engine.unbuilt import METHODS, check_arguments
from rustvllm.exceptions import ConfigError, EngineDeadError, QueueFullError, QueueTimeoutError, RustVLLMError
from rustvllm.logger import init_logger
from rustvllm.lora.async_adapters import AdapterMethods, AsyncAdapters
from rustvllm.lora.queries import LOAD_SECONDS
from rustvllm.lora.request import LoRARequest
from rustvllm.observe.metrics.counters import read_metrics
from rustvllm.observe.metrics.drain_rate import DrainRate
from rustvllm.observe.metrics.stat_logger import LoggingStatLogger, StatLoggerFactory
from rustvllm.observe.metrics.stat_reporter import StatReporter, checked_factories
from rustvllm.observe.trace.sinks import make_tracer
from rustvllm.observe.trace.startup_records import load_tokenizer
from rustvllm.observe.trace.tracer import StatusCallback, TraceCallback, Tracer
from rustvllm.outputs import PoolingRequestOutput, RequestOutput
from rustvllm.parameter_checks import check_number, refuse_attribute
from rustvllm.process.fork_guard import FORKS
from rustvllm.sampling_params import PoolingParams, SamplingParams
from rustvllm.tenant import Tenant

if TYPE_CHECKING:
    from rustvllm.config.engine_args import AsyncEngineArgs

logger = init_logger(__name__)

_LONGEST_WAIT = 86_400.0
"""Most seconds that a shutdown may wait for requests."""


class AsyncLLM(AsyncState, AdapterMethods):
    """An engine whose loop runs in its own thread or process; all coroutines belong to one event loop.

    One that is dropped without :meth:`shutdown` ends the engine and frees the model all the same.

    Attributes:
        config: What the engine was built from.
        tokenizer: None with ``skip_tokenizer_init``.
        tracer: Follows the requests; None disables tracing.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        multiprocess: bool | None = None,
        client: AsyncEngineClient | None = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        trace: TraceCallback | None = None,
        tracer: Tracer | None = None,
        on_status_change: StatusCallback | None = None,
    ) -> None:
        """Load the model and start the engine; blocks, and may run in a worker thread.

        Args:
            config: What engine.
            multiprocess: Run it in a process of its own; None: when ``RUSTVLLM_ENABLE_MULTIPROCESSING`` is set, else in
                a thread of this process.
            client: An engine that runs elsewhere, in place of one of this object's.
            stat_loggers: What makes further :class:`~rustvllm.observe.metrics.stat_logger.StatLogger` for each engine.
            trace: Called with a :class:`~rustvllm.observe.trace.tracer.TraceRecord` of all that happens to requests in
                this process, one after the other from two threads; one that raises is called no more.
            tracer: Takes the records instead; None: a tracer made from ``config.tracing``.
            on_status_change: Called with ``(request_id, old, new)`` for each change of a request's status, in the
                engine's thread; see :class:`~rustvllm.llm.LLM`. Not with ``tracer``, which may have it as a sink.

        Raises:
            ModelLoadError: Weights or tokenizer cannot be read.
            ConfigError: The KV cache is too small, or ``on_status_change`` is to hear of an engine in another process.
            EngineDeadError: The engine's process ended while it was starting, or ``client``'s cannot be reached.
        """
        self.config = config
        self._output_handler = OutputHandler()
        self._is_ending = False
        factories = checked_factories(stat_loggers)
        is_own = client is None
        is_elsewhere = not is_own or (envs.enable_multiprocessing() if multiprocess is None else multiprocess)
        if on_status_change is not None and is_elsewhere:
            raise ConfigError(
                "on_status_change needs the engine in a thread of this process: make the AsyncLLM with "
                "multiprocess=False"
            )
        if tracer is None:
            overlap = config.scheduler.async_scheduling
            tracer = make_tracer(
                config.tracing,
                "AsyncLLM",
                owns_file=is_own,
                has_overlap=overlap,
                callback=trace,
                on_status_change=on_status_change,
            )
        self.tracer = make_front_tracer(tracer, config)
        if tracer is not None:
            kind = type(client).__name__ if client is not None else "a process" if is_elsewhere else "a thread"
            tracer.note("engine_client", f"in {kind}" if is_own else kind)
        # The engine comes first: in another process it loads while the tokenizer is read here.
        self._client = client or make_client(
            config, self._output_handler.on_engine_death, tracer, multiprocess=is_elsewhere
        )
        self._finalizer = weakref.finalize(self, self._client.stop)
        self._finalizer.atexit = False  # the client sees to the exit itself
        FORKS.own(self)
        try:
            self.tokenizer = load_tokenizer(config, tracer)
            self._client.wait_until_ready()
            if config.model.fit_max_model_len:
                self.config = config.with_max_model_len(self._client.max_model_len)
            self.input_processor = InputProcessor(self.config, self.tokenizer)
            self._reporter = self._start_reporter(factories)
        except BaseException:
            self._client.shutdown()
            raise
        self._drain_rate = DrainRate(self._client.handle.stats)
        core_tokenizer = None if self.tokenizer is None else self.tokenizer.core
        interval = config.scheduler.stream_interval
        self._requests = RequestTable(
            self._client, core_tokenizer, self.tracer, stream_interval=interval, max_image_bytes=MAX_IMAGE_BYTES
        )
        self._output_handler.start(self._client, self._requests)
        self._adapters = AsyncAdapters(self.config, self._requests.adapters_in_use)
        self._pauses = PauseOrders()
        if is_own:
            for line in self.describe():
                logger.info("%s", line)

    @classmethod
    def from_engine_config(
        cls, config: EngineConfig, stat_loggers: Sequence[StatLoggerFactory] | None = None
    ) -> "AsyncLLM":
        """Build an engine from a finished configuration; see ``__init__``."""
        return cls(config, stat_loggers=stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: UsageContext = "api_server",  # noqa: ARG003 -- vLLM's signature; the configuration is finished
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,  # noqa: ARG003 -- there is one engine
        disable_log_stats: bool = False,
        client_addresses: Mapping[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> "AsyncLLM":
        """Build an engine from a finished configuration, with vLLM's arguments.

        Args:
            vllm_config: What engine, as ``EngineArgs.create_engine_config`` makes it.
            start_engine_loop: Must be True: an engine that is made runs.
            usage_context: No effect.
            stat_loggers: As for ``__init__``.
            enable_log_requests: Must be False: only the server logs requests.
            aggregate_engine_logging: No effect.
            disable_log_stats: Write no line of statistics.
            client_addresses: Must be None: ``rustvllm serve`` connects to engines elsewhere.
            client_count: Must be 1.
            client_index: Must be 0.

        Raises:
            ConfigError: An argument is wrong, or asks for what is not built.
            ModelLoadError: The model cannot be read.
        """
        _check_engine_loop(start_engine_loop)
        if enable_log_requests:
            raise ConfigError("enable_log_requests is not supported yet: only the server logs requests")
        if client_addresses is not None or (client_count, client_index) != (1, 0):
            raise ConfigError(
                "client_addresses, client_count and client_index are not supported yet: rustvllm serve "
                "--api-server-count N connects N front ends to its engines"
            )
        config = replace(vllm_config, log_stats=False) if disable_log_stats else vllm_config
        return cls(config, stat_loggers=stat_loggers)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: "AsyncEngineArgs",
        start_engine_loop: bool = True,
        usage_context: UsageContext = "api_server",
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
    ) -> "AsyncLLM":
        """Build an engine from engine arguments; ``start_engine_loop`` must be True.

        Raises:
            ConfigError: An argument is wrong.
            ModelLoadError: The model cannot be found or read.
        """
        _check_engine_loop(start_engine_loop)
        return cls(engine_args.create_engine_config(usage_context), stat_loggers=stat_loggers)

    async def generate(
        self,
        prompt: PromptType | EngineCoreRequest,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tenant: Tenant | None = None,
        **unbuilt: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs; leaving the generator early aborts it.

        Args:
            prompt: Text, token ids or a dict with ``prompt`` or ``prompt_token_ids``; or what
                ``input_processor.process`` returned, which has its parameters already.
            sampling_params: Also says what each output holds (``output_kind``); None for the model's own defaults.
            request_id: Not in use by a running request.
            lora_request: Its adapter, which is loaded if it is not yet; None: the model alone.
            tokenization_kwargs: ``{"add_special_tokens": False}`` leaves the tokenizer's own special tokens out of a
                text prompt; other keys are refused.
            trace_headers: W3C trace context (``traceparent``, ``tracestate``) whose part the request is.
            priority: Lower is sooner, with the priority policy.
            tenant: Whose share of the engine it is charged to, with the fair policy.
            unbuilt: Other arguments of vLLM, which must be None.

        Raises:
            InvalidRequestError: The request is wrong; other requests go on.
            QueueFullError: Too many requests, or too many tokens, are waiting.
            QueueTimeoutError: The request waited longer than ``queue_timeout``.
            RequestFailedError: The engine failed on this request.
            EngineDeadError: The engine died or was shut down.
            RuntimeError: The engine belongs to another event loop.
        """
        stream = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            tenant=tenant,
            **unbuilt,
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def encode(
        self,
        prompt: PromptType | EngineCoreRequest,
        pooling_params: PoolingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **unbuilt: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Run a request for the vector of its prompt and yield it; one that is aborted yields nothing.

        Arguments and errors are those of :meth:`generate`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        stream = await self.add_request(
            request_id,
            prompt,
            params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            **unbuilt,
        )
        try:
            async for output in stream:
                if output.pooled is not None:  # not where it was aborted
                    yield PoolingRequestOutput.of(output)
        finally:
            stream.close()

    async def add_request(
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
        sink: EventSink | None = None,
        arrival_ns: int | None = None,
        tenant: Tenant | None = None,
        ends_after_call: _core.TurnReading | None = None,
        **unbuilt: Any,
    ) -> RequestStream:
        """Hand a request to the engine at once and return its outputs; arguments and errors as for :meth:`generate`.

        Whatever is wrong with the request is raised here, before anything was yielded. With ``sink`` new text goes
        there as rendered events, straight from the event loop's callback, and the outputs hold each sample's end.
        ``arrival_time`` (seconds of ``time.time``) or ``arrival_ns`` (nanoseconds of CLOCK_MONOTONIC) is when the
        request came in, from which its latencies count; None: now. With ``ends_after_call`` a sample is read like
        this, and ends behind its first call of a tool.
        """
        if unbuilt:
            check_arguments("AsyncLLM.add_request", unbuilt)
        if arrival_time is not None:
            arrival_ns = arrival_ns_of(arrival_time)
        if lora_request is not None:
            await self.add_lora(lora_request)
        if isinstance(prompt, EngineCoreRequest):
            request = prompt if arrival_ns is None else replace(prompt, arrival_ns=arrival_ns)
        else:
            if tokenization_kwargs:
                [prompt] = with_tokenization([prompt], tokenization_kwargs)
            request = await self.input_processor.process_off_loop(
                prompt, params, priority, arrival_ns=arrival_ns, tenant=tenant
            )
        request = replace(request, ends_after_call=ends_after_call) if ends_after_call is not None else request
        self._client.check_alive()
        if self._is_ending:
            raise EngineDeadError("this engine is being shut down; it takes no new requests")
        if self._output_handler.broken is not None:
            self.check_health()
        self._output_handler.attach()
        if lora_request is not None:
            number = self._adapters.number_of(lora_request)
            request = replace(request, adapter=number, lora_request=lora_request)
        try:
            if request.params.num_samples > SAMPLES_AT_ONCE or request.multimodal:
                state = await self._add_in_turns(request_id, request, sink, trace_headers)
            else:
                state = self._requests.add(request_id, request, sink, trace_headers)
        except QueueFullError as error:
            raise self._with_advice(error) from None
        self._drain_rate.observe()
        return self._output_handler.open(state, self._with_advice)

    async def _add_in_turns(
        self,
        request_id: str,
        request: EngineCoreRequest,
        sink: EventSink | None,
        trace_headers: Mapping[str, str] | None,
    ) -> RequestState:
        """As ``RequestTable.add``, for a request of many samples or with images: others have their turns meanwhile."""
        state = self._requests.begin(request_id, request, sink, trace_headers)
        handing: asyncio.Future[None] | None = None
        try:
            for _ in self._requests.expecting(state, request):
                await asyncio.sleep(0)
                self.check_health()  # an engine that dies takes what is known of the request by then
            handing = asyncio.ensure_future(asyncio.to_thread(self._requests.hand_in, state, request))
            await asyncio.shield(handing)
            self.check_health()
        except BaseException:
            if handing is None or handing.done():
                self._requests.forget(state, abort=True)
            else:  # given up while the thread is at it: what it hands in is ended behind it
                handing.add_done_callback(partial(self._forget_handed_in, state))
            raise
        return state

    def _forget_handed_in(self, state: RequestState, handing: asyncio.Future[None]) -> None:
        handing.exception()  # read, so that asyncio does not report it: the caller has gone
        self._requests.forget(state, abort=True)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:  # noqa: ARG002 -- vLLM's signature
        """End requests; their generators yield a last output that says ``abort``. Unknown ids are ignored."""
        self._requests.abort(request_id)

    def reconnect(self, rank: int, timeout: float) -> None:
        """Take an engine that was started in a dead one's place; blocks up to ``timeout`` seconds, for any thread.

        Raises:
            EngineDeadError: There is none yet, or this object's engine is not one that a launcher restarts.
        """
        if not isinstance(self._client, RemoteClient):
            raise EngineDeadError("this engine cannot be started again; make a new AsyncLLM")
        client = self._client
        with self._adapters.restoring(rank):
            self._pauses.reconnect(client, rank, timeout)
            self._adapters.restore(rank, lambda kind, payload: client.query(rank, kind, payload, LOAD_SECONDS))

    def leave_silent_engines(self) -> None:
        """End the requests of engines that hang, where this object is to decide that; called some times a second."""
        if isinstance(self._client, RemoteClient):
            self._client.leave_silent()

    def _start_reporter(self, stat_loggers: Sequence[StatLoggerFactory]) -> StatReporter | None:
        """The reporter that feeds the stat loggers; an engine in a process of its own writes its line itself."""
        is_here = isinstance(self._client, ThreadClient) and self.config.log_stats
        factories = [*([LoggingStatLogger] if is_here else []), *stat_loggers]
        if not factories:
            return None
        handle = self._client.handle  # and not this object, which the thread would keep alive
        reporter = StatReporter(lambda: read_metrics(handle, STATS_TIMEOUT), factories, self.config)
        reporter.start()
        weakref.finalize(self, reporter.stop).atexit = False
        return reporter

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine thread within two seconds and fail what is under way. Idempotent, from any thread.

        Args:
            timeout: Seconds that requests under way have to end before that; new ones are refused meanwhile. None and
                0: none. On the event loop this blocks it, and readers get their outputs afterwards.

        Raises:
            InvalidRequestError: ``timeout`` is not a number of seconds.
        """
        if timeout is not None:
            check_number("timeout", timeout, 0, _LONGEST_WAIT)
        if not self._finalizer.alive:  # a fork's: the engine is another process's
            return
        if timeout:
            self._is_ending = True
            self._output_handler.wait_for_requests(timeout)
        if self._reporter is not None:
            self._reporter.stop()
        self._client.shutdown()
        self._output_handler.leave_loop()
        if self.tracer is not None:
            self.tracer.close()

    def _with_advice(self, error: RustVLLMError) -> RustVLLMError:
        """An error with what helps its caller: the limit that was met, and when to try again."""
        if isinstance(error, QueueTimeoutError):
            limit = self.config.scheduler.queue_timeout
            error = QueueTimeoutError(
                f"the request waited longer than queue_timeout = {limit:g} s and did not start; try again later"
            )
        if isinstance(error, QueueFullError | QueueTimeoutError):
            error.retry_after = self._drain_rate.retry_after()
        return error

    def leave_fork(self, why: str) -> None:
        """Refuse all use in a fork, and leave the engine to the process that made it."""
        self._finalizer.detach()
        self._output_handler.broken = EngineDeadError(why)

    def __getattr__(self, name: str) -> Any:
        """Say of what is not built yet that it is not, in place of a bare name."""
        refuse_attribute(self, name, METHODS)


def _check_engine_loop(start_engine_loop: object) -> None:
    if start_engine_loop is not True:
        raise ConfigError(f"start_engine_loop must be True, got {start_engine_loop!r:.80}: an engine that is made runs")


AsyncLLMEngine = AsyncLLM
"""vLLM's older name of the same class."""
