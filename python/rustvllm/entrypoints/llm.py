"""``LLM``: many prompts at once, offline, with the results in the order of the prompts."""

import numbers
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from rustvllm.engine.describe import describe_engine
from rustvllm.engine.input_processor import EngineCoreRequest, PromptType, default_sampling_params
from rustvllm.engine.llm_engine import LLMEngine
from rustvllm.engine.metrics import Metric
from rustvllm.engine.startup_records import note_command_line, note_configuration
from rustvllm.engine.stat_logger import StatLoggerFactory
from rustvllm.engine.tokenizer import Tokenizer
from rustvllm.engine.trace_sinks import make_tracer
from rustvllm.engine_args import EngineArgs
from rustvllm.exceptions import ConfigError, InvalidRequestError, QueueFullError, RequestFailedError
from rustvllm.logger import init_logger
from rustvllm.outputs import RequestOutput
from rustvllm.sampling_params import RequestOutputKind, SamplingParams
from rustvllm.tracing import TraceCallback, program_name

logger = init_logger(__name__)

Prompts = PromptType | Sequence[PromptType]
Messages = Sequence[Mapping[str, Any]]
_NOT_BUILT = frozenset(
    {
        "apply_model",
        "beam_search",
        "classify",
        "collective_rpc",
        "embed",
        "encode",
        "is_sleeping",
        "reset_prefix_cache",
        "reward",
        "score",
        "sleep",
        "start_profile",
        "stop_profile",
        "wake_up",
    }
)
"""What callers of this class know from elsewhere and will not find here."""


class LLM:
    """A language model in this process.

    Example:
        >>> from rustvllm import LLM, SamplingParams
        >>> llm = LLM()  # the model inside the package
        >>> [output] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        >>> len(output.outputs[0].token_ids)
        8

    Attributes:
        llm_engine: The engine underneath.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        trace: bool | TraceCallback | None = None,
        stat_loggers: Sequence[StatLoggerFactory] | None = None,
        **engine_args: Any,
    ) -> None:
        """Load a model.

        Args:
            model: A folder or a hub name; None: the model inside the package.
            stat_loggers: Classes of :class:`~rustvllm.engine.stat_logger.StatLogger`, or functions that make them.
            trace: Log what happens to each request (True), or call this with a
                :class:`~rustvllm.tracing.TraceRecord` of each such thing; one that raises is called no more.
            engine_args: Any argument of :class:`~rustvllm.engine_args.EngineArgs`.

        Raises:
            TypeError: An argument that does not exist; names the nearest one.
            ConfigError: An argument is wrong.
            ModelLoadError: The model cannot be found or read.
        """
        began_ns = time.monotonic_ns()
        callback = trace if callable(trace) else None
        if callback is None and not isinstance(trace, bool | None):
            raise ConfigError(f"trace must be True, False or a function that takes a TraceRecord, got {trace!r:.200}")
        args = EngineArgs.from_kwargs(model=model, trace=bool(trace) if callback is None else False, **engine_args)
        config = args.create_engine_config("llm_class")
        overlap = config.scheduler.async_scheduling
        tracer = make_tracer(config.tracing, "LLM", owns_file=True, has_overlap=overlap, callback=callback)
        note_command_line(tracer, program_name())
        note_configuration(tracer, args, config, began_ns)
        self.llm_engine = LLMEngine(config, tracer, stat_loggers)
        for line in describe_engine(self.llm_engine.config, self.llm_engine.engine_core.num_blocks):
            logger.info("%s", line)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Everything is checked before the first prompt runs. Ctrl-C ends the call after the present step and leaves the
        engine usable; a second Ctrl-C does not wait.

        Args:
            prompts: One prompt or several; each is text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``.
            sampling_params: For all prompts, or one for each; None for the model's own defaults.
            use_tqdm: Show a progress bar with tokens per second; or what makes one, with the arguments of ``tqdm``.
            priority: One number per prompt, lower is sooner; needs ``scheduling_policy="priority"``.
            lora_request: Must be None: adapters are not supported yet.

        Returns:
            One output per prompt, in their order.

        Raises:
            InvalidRequestError: A prompt or parameter is wrong; nothing has run. A ``ValueError``.
            RequestFailedError: The engine failed on some prompts; its ``outputs`` holds all of them.
            EngineDeadError: The engine was shut down or is broken.
        """
        self.llm_engine.engine_core.check_alive()
        if lora_request is not None:
            raise InvalidRequestError("lora_request is not supported yet", "lora_request")
        return self._run(self._check(_as_prompts(prompts), sampling_params, priority), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: One conversation, or several; each is a list of ``{"role": …, "content": …}``, with text or a list
                of text parts as content.
            sampling_params: As in :meth:`generate`.
            use_tqdm: As in :meth:`generate`.
            chat_template: Jinja template to use instead of the model's.
            chat_template_content_format: ``string``: the template gets text; ``openai``: a list of parts; ``auto``:
                such a list if it walks through one.
            add_generation_prompt: End the prompt where the assistant's answer begins.
            continue_final_message: Let the model go on with the last message; excludes ``add_generation_prompt``.
            tools: Tools for the template to describe.
            chat_template_kwargs: Further variables for the template.
            lora_request: As in :meth:`generate`.

        Returns:
            One output per conversation, in their order.

        Raises:
            InvalidRequestError: A message, template or parameter is wrong.
            ValueError: There is no tokenizer.
        """
        from rustvllm.entrypoints.chat_template import PLAIN_CHAT_TEMPLATE, check_template_variables, render_chat

        tokenizer = self.get_tokenizer()
        variables = chat_template_kwargs or {}
        check_template_variables(variables)
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise InvalidRequestError(
                f"chat_template_content_format must be auto, string or openai, "
                f"got {chat_template_content_format!r:.80}",
                "chat_template_content_format",
            )
        if tools is not None and not tools:
            raise InvalidRequestError("tools must not be an empty list; leave it out instead", "tools")
        own_template = chat_template or tokenizer.chat_template
        prompts: list[PromptType] = []
        for conversation in _as_conversations(messages):
            template = own_template or PLAIN_CHAT_TEMPLATE
            text = render_chat(
                tokenizer,
                _build_conversation(conversation, template, chat_template_content_format),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                **variables,
            )
            if not text:
                raise InvalidRequestError("the chat template makes an empty prompt of the messages", "messages")
            # A model's own template writes its special tokens itself; the plain one leaves them to the tokenizer.
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, not own_template)})
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValueError: There is none (``skip_tokenizer_init``).
        """
        return self.llm_engine.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """What was counted so far, under the names and by the rules of ``docs/metrics.md``.

        Raises:
            EngineDeadError: The engine was shut down.
        """
        self.llm_engine.engine_core.check_alive()
        return self.llm_engine.get_metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``sampling_params=None`` means: the model's generation_config, else ``SamplingParams()``."""
        return default_sampling_params(self.llm_engine.config.model)

    def shutdown(self) -> None:
        """Free the model and its memory; idempotent. Any later use raises EngineDeadError."""
        self.llm_engine.shutdown()

    def __getattr__(self, name: str) -> Any:
        """Say of what is not built yet that it is not, in place of a bare name."""
        if name in _NOT_BUILT:
            raise AttributeError(f"LLM.{name} is not supported yet")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check(
        self,
        prompts: list[PromptType],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[EngineCoreRequest]:
        if params is None or isinstance(params, SamplingParams):
            shared = self.get_default_sampling_params() if params is None else params
            every: Sequence[SamplingParams] = [shared] * len(prompts)
        else:
            every = params
            if len(every) != len(prompts):
                raise InvalidRequestError(
                    f"sampling_params has {len(every)} entries for {len(prompts)} prompts; give one, or one for each",
                    "sampling_params",
                )
        if priority is not None and len(priority) != len(prompts):
            raise InvalidRequestError(f"priority has {len(priority)} entries for {len(prompts)} prompts", "priority")
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, every, strict=True)):
            try:
                if isinstance(own, SamplingParams):
                    if own.max_tokens == 0:
                        raise InvalidRequestError("max_tokens must be at least 1, got 0", "max_tokens")
                    # Nobody looks at what is unfinished, so nothing is made of it.
                    own = own.clone(output_kind=RequestOutputKind.FINAL_ONLY)  # noqa: PLW2901
                    limit = self.llm_engine.config.scheduler.max_num_queued_reqs
                    if own.num_samples > limit:
                        name = "n" if own.best_of is None else "best_of"
                        raise InvalidRequestError(
                            f"{name} is {own.num_samples}, but at most {limit} requests may wait", name
                        )
                requests.append(
                    self.llm_engine.input_processor.process(prompt, own, 0 if priority is None else priority[index])
                )
            except InvalidRequestError as error:
                if len(prompts) == 1:
                    raise
                raise InvalidRequestError(f"prompt {index}: {error}", error.param) from error
        return requests

    def _run(self, requests: list[EngineCoreRequest], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Run checked requests to their end."""
        first = self._num_requests
        self._num_requests += len(requests)
        outputs: dict[str, RequestOutput] = {}
        ids = [f"llm-{first + index}" for index in range(len(requests))]
        with _DeferredInterrupt() as interrupt, _Progress(len(requests), use_tqdm) as progress:
            try:
                waiting = deque(zip(ids, requests, strict=True))
                while self._feed(waiting) or self.llm_engine.has_unfinished_requests():
                    for output in self.llm_engine.step():
                        if output.finished:
                            outputs[output.request_id] = output
                            progress.add(output)
                    interrupt.check()
            except BaseException:
                self.llm_engine.abort_all()
                raise
        results = [outputs[request_id] for request_id in ids]
        failed = [output for output in results if output.error is not None]
        if failed:
            raise RequestFailedError(
                f"the engine failed on {len(failed)} of {len(results)} prompts, first: {failed[0].error}", results
            )
        return results

    def _feed(self, waiting: deque[tuple[str, EngineCoreRequest]]) -> bool:
        """Queue what the waiting queue has room for, since any number of prompts may be given; True if it was any."""
        engine, fed = self.llm_engine, False
        limit = engine.config.scheduler.max_num_queued_reqs
        while waiting and engine.num_unfinished_samples() + waiting[0][1].params.num_samples <= limit:
            try:
                engine.add_request(*waiting[0])
            except QueueFullError:  # max_num_queued_tokens: it is taken when those before it have begun
                break
            waiting.popleft()
            fed = True
        return fed


def _as_prompts(prompts: Any) -> list[PromptType]:
    """One prompt or several, as a list; a list of integers, numpy's too, is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]  # its keys are checked with the rest of the request
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        if hasattr(prompts, "tolist"):  # an array of token ids
            return _as_prompts(prompts.tolist())
        raise InvalidRequestError(
            f"prompts must be text, token ids, a dict or a list of these, got {type(prompts).__name__}", "prompt"
        )
    if prompts and all(isinstance(item, numbers.Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Any) -> list[Messages]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of messages, or a list of such lists", "messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _build_conversation(messages: Any, chat_template: str, content_format: str) -> list[dict[str, Any]]:
    """One conversation with the checks of the server, so that both take and refuse the same."""
    from pydantic import ValidationError

    from rustvllm.entrypoints.openai.conversation import build_conversation
    from rustvllm.entrypoints.openai.protocol import ChatMessage

    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(
            f"a conversation must be a list of messages, got {type(messages).__name__}", "messages"
        )
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{index}] must be a dict with 'role' and 'content', got {type(message).__name__}", "messages"
            )
        try:
            checked.append(ChatMessage.model_validate(dict(message)))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidRequestError(f"messages[{index}].{where}: {first['msg']}", "messages") from error
    return build_conversation(checked, chat_template, content_format)


class _Progress:
    """A progress bar over prompts with tokens per second, read and generated; nothing when it is not wanted."""

    def __init__(self, total: int, wanted: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        if wanted and total:
            from tqdm import tqdm

            make = wanted if callable(wanted) else tqdm
            self._bar = make(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
        self._start = time.monotonic()
        self._num_input = self._num_output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """Count one finished prompt."""
        if self._bar is None:
            return
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(sample.token_ids) for sample in output.outputs)
        elapsed = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_input / elapsed:.1f} tokens/s, output: {self._num_output / elapsed:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update()


class _Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.pressed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt when it was."""
        if self.pressed:
            raise KeyboardInterrupt


@contextmanager
def _DeferredInterrupt() -> Iterator[_Interrupt]:  # noqa: N802 -- reads as the context it is
    """Hold the first Ctrl-C back until :meth:`_Interrupt.check`, so that it never falls between the halves of a step.

    Only Python's own handler is replaced, and only in the main thread; elsewhere nothing changes.
    """
    interrupt = _Interrupt()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interrupt
        return

    def on_sigint(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:  # the second one does not wait
            signal.default_int_handler(number, frame)
        interrupt.pressed = True

    signal.signal(signal.SIGINT, on_sigint)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
