"""``LLM``: many prompts at once, offline, with the results in the order of the prompts."""

import dataclasses
import numbers
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.engine_params import engine_params
from rustvllm.engine.input_processor import EngineCoreRequest, PromptType, default_sampling_params
from rustvllm.engine.llm_engine import LLMEngine
from rustvllm.exceptions import ConfigError, InvalidRequestError, QueueFullError, RequestFailedError
from rustvllm.logger import init_logger
from rustvllm.observe.inspect.description import describe_engine
from rustvllm.observe.metrics.counters import Metric
from rustvllm.observe.metrics.stat_logger import StatLoggerFactory
from rustvllm.observe.trace.sinks import make_tracer
from rustvllm.observe.trace.startup_records import note_command_line, note_configuration
from rustvllm.observe.trace.tracer import TraceCallback, program_name
from rustvllm.outputs import RequestOutput
from rustvllm.sampling_params import RequestOutputKind, SamplingParams
from rustvllm.text.transformers_tokenizer import load_transformers_tokenizer

if TYPE_CHECKING:
    from rustvllm.text.chat_renderer import ChatRenderer

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
            stat_loggers: Classes of :class:`~rustvllm.observe.metrics.stat_logger.StatLogger`, or their factories.
            trace: Log what happens to each request (True), or call this with a
                :class:`~rustvllm.observe.trace.tracer.TraceRecord` of each; one that raises is called no more.
            engine_args: Any argument of :class:`~rustvllm.config.engine_args.EngineArgs`.

        Raises:
            TypeError: An argument that does not exist; names the nearest one.
            ConfigError: An argument is wrong.
            ModelLoadError: The model cannot be found or read.
        """
        began_ns = time.monotonic_ns()
        callback = trace if callable(trace) else None
        if callback is None and not isinstance(trace, bool | None):
            raise ConfigError(f"trace must be True, False or a function that takes a TraceRecord, got {trace!r:.200}")
        args = EngineArgs.from_kwargs(model=model, trace=None if callback is not None else trace, **engine_args)
        config = args.create_engine_config("llm_class")
        overlap = config.scheduler.async_scheduling
        tracer = make_tracer(config.tracing, "LLM", owns_file=True, has_overlap=overlap, callback=callback)
        note_command_line(tracer, program_name())
        note_configuration(tracer, args, config, began_ns)
        self.llm_engine = LLMEngine(config, tracer, stat_loggers)
        for line in describe_engine(self.llm_engine.config, self.llm_engine.engine_core.num_blocks):
            logger.info("%s", line)
        self._num_requests = 0
        self._tokenizer: Any = None
        self._renderer: ChatRenderer | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model that engine arguments describe.

        Raises:
            ConfigError: An argument is wrong.
            ModelLoadError: The model cannot be found or read.
        """
        return cls(**{field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)})

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
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
            tokenization_kwargs: ``{"add_special_tokens": False}`` leaves the tokenizer's own special tokens out of text
                prompts; other keys are refused.
            prompt_token_ids: Prompts as token ids in place of ``prompts``, as older versions of vLLM take them.

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
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequestError("give either prompts or prompt_token_ids, one of the two", "prompt")
        checked = _as_prompts(prompt_token_ids if prompts is None else prompts)
        if tokenization_kwargs:
            checked = _with_tokenization(checked, tokenization_kwargs)
        return self._run(self._check(checked, sampling_params, priority), use_tqdm)

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
        mm_processor_kwargs: Mapping[str, Any] | None = None,
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
            mm_processor_kwargs: Must be None or empty: images, audio and video are not supported.

        Returns:
            One output per conversation, in their order.

        Raises:
            InvalidRequestError: A message, template or parameter is wrong.
            ValueError: There is no tokenizer.
        """
        from rustvllm.text.chat_template import check_template_variables

        if mm_processor_kwargs:
            raise InvalidRequestError(
                "mm_processor_kwargs is not supported: messages hold text alone", "mm_processor_kwargs"
            )
        tokenizer = self.llm_engine.get_tokenizer()
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
        renderer = self._chat_renderer(own_template)
        conversations = [
            _build_conversation(conversation, renderer, chat_template_content_format)
            for conversation in _as_conversations(messages)
        ]
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **variables,
        }

        prompts: list[PromptType] = []
        for conversation in conversations:
            text = renderer.render_blocking(renderer.prepare(conversation, options))
            if not text:
                raise InvalidRequestError("the chat template makes an empty prompt of the messages", "messages")
            # A model's own template writes its special tokens itself; the plain one leaves them to the tokenizer.
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, not own_template)})
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def _chat_renderer(self, template: str | None) -> "ChatRenderer":
        """Renders ``template`` (None: the plain one); the last one is kept, with its processes."""
        from rustvllm.text.chat_renderer import ChatRenderer
        from rustvllm.text.chat_template import PLAIN_CHAT_TEMPLATE, special_tokens

        template = template or PLAIN_CHAT_TEMPLATE
        if self._renderer is None or self._renderer.template != template:
            self._renderer = ChatRenderer(template, special_tokens(self.llm_engine.get_tokenizer()), "LLM.chat")
        return self._renderer

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers loads it (``apply_chat_template``, ``get_vocab``, ``batch_decode`` …).

        It is loaded at the first call. The engine uses its own (``llm_engine.get_tokenizer()``), with the same ids.

        Raises:
            ValueError: There is none (``skip_tokenizer_init``).
            ModelLoadError: transformers cannot read its files.
        """
        self.llm_engine.get_tokenizer()  # raises where there is none
        if self._tokenizer is None:
            self._tokenizer = load_transformers_tokenizer(self.llm_engine.config.model)
        return self._tokenizer

    def get_world_size(self, include_dp: bool = True) -> int:  # noqa: ARG002 -- vLLM's signature
        """Number of devices that the model is spread over: 1."""
        return 1

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
        given = made = None  # neighbours may share their parameters
        for index, (prompt, own) in enumerate(zip(prompts, every, strict=True)):
            try:
                if isinstance(own, SamplingParams):
                    # The caller never sees unfinished outputs, so none are made.
                    if own is not given:
                        given, made = own, engine_params(own).with_output_kind(RequestOutputKind.FINAL_ONLY)
                    assert made is not None
                    own = made  # noqa: PLW2901
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
        ids = [str(first + index) for index in range(len(requests))]
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


def _with_tokenization(prompts: list[PromptType], options: Mapping[str, Any]) -> list[PromptType]:
    """Text prompts with ``tokenization_kwargs`` of a call; prompts of token ids stay as they are."""
    if unknown := sorted(set(options) - {"add_special_tokens"}):
        raise InvalidRequestError(
            f"tokenization_kwargs may hold add_special_tokens, got {', '.join(map(str, unknown))}",
            "tokenization_kwargs",
        )
    changed: list[Any] = []  # what the dicts hold is checked with the rest of the request
    for prompt in prompts:
        if isinstance(prompt, str):
            changed.append({"prompt": prompt, **options})
        elif isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt:
            changed.append({**options, **prompt})
        else:
            changed.append(prompt)
    return changed


def _as_conversations(messages: Any) -> list[Messages]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of messages, or a list of such lists", "messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _build_conversation(messages: Any, renderer: "ChatRenderer", content_format: str) -> list[dict[str, Any]]:
    """One conversation with the checks of the server, so that both take and refuse the same."""
    from pydantic import ValidationError

    from rustvllm.server.endpoints.conversation import build_conversation, shows_parts
    from rustvllm.server.schemas.protocol import ChatMessage

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
    in_parts = shows_parts(content_format, renderer.walks_through_parts)
    return build_conversation(checked, renderer.template, in_parts=in_parts)


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
        self._num_input += len(output.prompt_ids)
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
