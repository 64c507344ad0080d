"""``LLM``: many prompts at once, offline, with the results in the order of the prompts."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rustvllm.beam_search import BeamSearchOutput, beam_search_outputs
from rustvllm.config import ModelConfig
from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.input_processor import InputProcessor
from rustvllm.engine.llm_engine import LLMEngine
from rustvllm.engine.request.core_request import EngineCoreRequest, engine_params
from rustvllm.engine.request.default_params import default_sampling_params
from rustvllm.engine.request.prompts import PromptType, with_tokenization
from rustvllm.engine.unbuilt import METHODS
from rustvllm.exceptions import ConfigError, InvalidRequestError
from rustvllm.logger import init_logger
from rustvllm.lora.request import LoRARequest, one_for_each
from rustvllm.observe.inspect.description import describe_engine
from rustvllm.observe.metrics.counters import Metric
from rustvllm.observe.metrics.stat_logger import StatLoggerFactory
from rustvllm.observe.trace.sinks import make_tracer
from rustvllm.observe.trace.startup_records import note_command_line, note_configuration
from rustvllm.observe.trace.tracer import StatusCallback, TraceCallback, program_name
from rustvllm.offline.conversations import Conversations, Messages, read_own_template
from rustvllm.offline.pooling import PoolingMethods, named_in_errors
from rustvllm.offline.prompt_queue import PromptQueue
from rustvllm.offline.prompts import (
    AnyParams,
    Prompts,
    as_prompts,
    as_prompts_of_ids,
    check_no_media,
    params_of_each,
    priority_of_each,
)
from rustvllm.outputs import RequestOutput
from rustvllm.parameter_checks import check_int, refuse_attribute
from rustvllm.sampling_params import BeamSearchParams, PoolingParams, RequestOutputKind, SamplingParams
from rustvllm.text.transformers_tokenizer import load_transformers_tokenizer
from rustvllm.text.turn_formats import AUTO, check_reasoning_parser

logger = init_logger(__name__)


class LLM(PoolingMethods):
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
        on_status_change: StatusCallback | None = None,
        chat_template: str | Path | None = None,
        reasoning_parser: str = "",
        **engine_args: Any,
    ) -> None:
        """Load a model.

        Args:
            model: A folder or a hub name; None: the model inside the package.
            stat_loggers: Classes of :class:`~rustvllm.observe.metrics.stat_logger.StatLogger`, or their factories.
            trace: Log what happens to each request (True), or call this with a
                :class:`~rustvllm.observe.trace.tracer.TraceRecord` of each; one that raises is called no more.
            on_status_change: Called with ``(request_id, old, new)`` for each change of a request's status in the
                scheduler (``WAITING``, ``RUNNING``, ``PREEMPTED``, ``SWAPPED``, ``FINISHED_…``; ``old`` is None at
                first), in their order, when the step is done that made them; one that raises is called no more. The
                samples of a request with ``n`` have the ids ``0_id``, ``1_id``, ….
            chat_template: Jinja template of :meth:`chat`, or a file with it, instead of the model's.
            reasoning_parser: Name of the format in which the model marks its reasoning, for ``thinking_token_budget``
                and for ``structured_outputs`` of :meth:`chat`; empty and ``auto``: recognised from the chat template,
                ``none``: it has no reasoning.
            engine_args: Any argument of :class:`~rustvllm.config.engine_args.EngineArgs`.

        Raises:
            TypeError: An argument that does not exist; names the nearest one.
            ConfigError: An argument is wrong.
            InvalidRequestError: ``chat_template`` is not valid Jinja.
            ModelLoadError: The model cannot be found or read.
        """
        began_ns = time.monotonic_ns()
        callback = trace if callable(trace) else None
        if callback is None and not isinstance(trace, bool | None):
            raise ConfigError(f"trace must be True, False or a function that takes a TraceRecord, got {trace!r:.200}")
        own_template = read_own_template(chat_template)
        if reasoning_parser:
            check_reasoning_parser(reasoning_parser, "reasoning_parser")
        args = EngineArgs.from_kwargs(model=model, trace=None if callback is not None else trace, **engine_args)
        config = args.create_engine_config("llm_class")
        overlap = config.scheduler.async_scheduling
        tracer = make_tracer(
            config.tracing,
            "LLM",
            owns_file=True,
            has_overlap=overlap,
            callback=callback,
            on_status_change=on_status_change,
        )
        note_command_line(tracer, program_name(), began_ns)
        note_configuration(tracer, args, config, began_ns)
        self.llm_engine = LLMEngine(config, tracer, stat_loggers)
        for line in describe_engine(self.llm_engine.config, self.llm_engine.engine_core.num_blocks):
            logger.info("%s", line)
        if own_template or reasoning_parser:
            self.input_processor.thinking.read_template(own_template, reasoning_parser or AUTO)
        self._queue = PromptQueue(self.llm_engine)
        self._conversations = Conversations(self.llm_engine, own_template)
        self._tokenizer: Any = None

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
        sampling_params: AnyParams | Iterable[AnyParams | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Everything is checked before the first prompt runs. Ctrl-C ends the call after the present step and leaves the
        engine usable; a second Ctrl-C does not wait.

        Args:
            prompts: One prompt or several; each is text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``.
                An iterable (a generator, say) of prompts is read to its end before the first of them runs.
            sampling_params: For all prompts, or one for each, as a list or another iterable; None, also as an entry,
                for the model's own defaults.
            use_tqdm: Show a progress bar with tokens per second; or what makes one, with the arguments of ``tqdm``.
            priority: One number per prompt or one for all, lower is sooner; needs ``scheduling_policy="priority"``.
            lora_request: The adapter of all prompts, or one (or None) for each; needs ``enable_lora=True``. What is not
                loaded yet is loaded first.
            tokenization_kwargs: ``{"add_special_tokens": False}`` leaves the tokenizer's own special tokens out of text
                prompts; other keys are refused.
            mm_processor_kwargs: Must be None or empty: images are processed as the model's folder says.
            prompt_token_ids: Prompts as token ids in place of ``prompts``, as older versions of vLLM take them.

        Returns:
            One output per prompt, in their order.

        Raises:
            InvalidRequestError: A prompt or parameter is wrong; nothing has run. A ``ValueError``.
            RequestFailedError: The engine failed on some prompts; its ``outputs`` holds all of them.
            EngineDeadError: The engine was shut down or is broken.
        """
        self._queue.check_turn()
        check_no_media(mm_processor_kwargs)
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequestError("give either prompts or prompt_token_ids, not both or neither", "prompt")
        checked = as_prompts_of_ids(prompt_token_ids) if prompts is None else as_prompts(prompts)
        if tokenization_kwargs:
            checked = with_tokenization(checked, tokenization_kwargs)
        requests = self._check(checked, sampling_params, priority)
        if lora_request is not None:
            requests = self._with_adapters(requests, lora_request)
        return self._queue.run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the likeliest completions of prompts, as ``docs/beam-search.md`` describes it.

        Args:
            prompts: As in :meth:`generate`.
            params: Of all searches.
            lora_request: As in :meth:`generate`.
            use_tqdm: As in :meth:`generate`.
            concurrency_limit: Searches at once at most; None: as many as there is room for.

        Returns:
            One output per prompt, in their order, each with ``beam_width`` sequences, best first.

        Raises:
            InvalidRequestError: A prompt or parameter is wrong; nothing has run. A ``ValueError``.
            RequestFailedError: The engine failed on some prompts.
            EngineDeadError: The engine was shut down or is broken.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"params must be a BeamSearchParams, got {type(params).__name__}", "params")
        self._queue.check_turn()
        requests, outputs = self._check(as_prompts(prompts), params, None), list[RequestOutput]()
        limit = max(1, len(requests)) if concurrency_limit is None else concurrency_limit
        check_int("concurrency_limit", limit, 1)
        adapters = None if lora_request is None else one_for_each(lora_request, len(requests))
        for first in range(0, len(requests), limit):
            some = requests[first : first + limit]
            if adapters is not None:
                some = self._with_adapters(some, adapters[first : first + limit])
            outputs += self._queue.run(some, use_tqdm)
        return beam_search_outputs(outputs, params, self.llm_engine.tokenizer, adapters)

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: AnyParams | Iterable[AnyParams | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,  # noqa: ARG002 -- vLLM's signature; queueing takes no time to show
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts without running them; :meth:`wait_for_completion` runs them, and so does :meth:`generate`.

        Args:
            prompts: As in :meth:`generate`, and so are the others.
            sampling_params: As in :meth:`generate`.
            lora_request: As in :meth:`generate`.
            priority: As in :meth:`generate`.
            use_tqdm: No effect.
            tokenization_kwargs: As in :meth:`generate`.
            mm_processor_kwargs: As in :meth:`generate`.

        Returns:
            The id of each request, in the order of the prompts.

        Raises:
            InvalidRequestError: A prompt or parameter is wrong; nothing was queued.
            EngineDeadError: The engine was shut down or is broken.
        """
        self.llm_engine.engine_core.check_alive()
        self._queue.caller.check_thread()
        check_no_media(mm_processor_kwargs)
        checked = as_prompts(prompts)
        if tokenization_kwargs:
            checked = with_tokenization(checked, tokenization_kwargs)
        requests = self._check(checked, sampling_params, priority)
        if lora_request is not None:
            requests = self._with_adapters(requests, lora_request)
        return self._queue.enqueue(requests)

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: AnyParams | Iterable[AnyParams | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """:meth:`enqueue` for conversations; arguments as for :meth:`chat`.

        Raises:
            InvalidRequestError: A message, template or parameter is wrong; nothing was queued.
        """
        prompts = self._conversations.prompts(
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        params = self._conversations.params(prompts, sampling_params)
        return self.enqueue(prompts, params, lora_request, priority, use_tqdm)

    def wait_for_completion(
        self,
        output_type: type[Any] | tuple[type[Any], ...] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Run what :meth:`enqueue` has queued to its end. Ctrl-C ends the call, and all that was queued with it.

        Args:
            output_type: ``RequestOutput``, a tuple with it, or None: there is no other kind of outputs.
            use_tqdm: As in :meth:`generate`.

        Returns:
            One output for each prompt that was queued since the last call, in their order; none for those that the
            caller took from ``llm_engine.step()``.

        Raises:
            RequestFailedError: The engine failed on some of them; its ``outputs`` holds all.
            EngineDeadError: The engine was shut down or is broken.
        """
        self._queue.check_turn()
        if output_type is not None and RequestOutput not in (
            output_type if isinstance(output_type, tuple) else (output_type,)
        ):
            raise TypeError(f"output_type must be RequestOutput, a tuple with it, or None, got {output_type!r}")
        return self._queue.run_enqueued(use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: AnyParams | Iterable[AnyParams | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        ``structured_outputs`` hold for the message in the channel ``final`` of a model that answers in messages
        (gpt-oss), and behind the reasoning where ``LLM(reasoning_parser=…)`` names its format: the thoughts before it
        are free, and part of the output. Elsewhere, and in :meth:`generate`, they hold from the first token on.

        Args:
            messages: One conversation, or several; each is a list of ``{"role": …, "content": …}``, with text or a list
                of text parts as content.
            sampling_params: As in :meth:`generate`.
            use_tqdm: As in :meth:`generate`.
            lora_request: As in :meth:`generate`.
            priority: As in :meth:`generate`, one number per conversation or one for all.
            chat_template: Jinja template to use instead of the model's.
            chat_template_content_format: ``string``: the template gets text; ``openai``: a list of parts; ``auto``:
                such a list if it walks through one.
            add_generation_prompt: End the prompt where the assistant's answer begins.
            continue_final_message: Let the model go on with the last message; excludes ``add_generation_prompt``.
            tools: Tools for the template to describe.
            chat_template_kwargs: Further variables for the template.
            tokenization_kwargs: ``{"add_special_tokens": True}`` has the tokenizer add its own special tokens, which
                are left to the model's template otherwise.
            mm_processor_kwargs: Must be None or empty: images are processed as the model's folder says.

        Returns:
            One output per conversation, in their order.

        Raises:
            InvalidRequestError: A message, template or parameter is wrong.
            ValueError: There is no tokenizer.
        """
        prompts = self._conversations.prompts(
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        params = self._conversations.params(prompts, sampling_params)
        return self.generate(prompts, params, use_tqdm, priority, lora_request)

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, as vLLM names it."""
        return self.llm_engine.model_config

    @property
    def input_processor(self) -> InputProcessor:
        """What checks requests and makes token ids of their prompts."""
        return self.llm_engine.input_processor

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the engine does: ``generate`` or ``embed``."""
        return self.llm_engine.get_supported_tasks()

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
        self._queue.caller.check_thread()
        return self.llm_engine.reset_prefix_cache(reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Do nothing: images are processed anew for each request; ``docs/vision.md`` says what the worker keeps."""

    def shutdown(self) -> None:
        """Free the model and its memory; idempotent. Any later use raises EngineDeadError."""
        self.llm_engine.shutdown()

    def __getattr__(self, name: str) -> Any:
        """Say of what is not built yet that it is not, in place of a bare name."""
        refuse_attribute(self, name, METHODS)

    def __repr__(self) -> str:
        return f"LLM(model={self.model_config.model!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check(
        self,
        prompts: list[PromptType],
        params: AnyParams | Iterable[AnyParams | None] | None,
        priority: int | Sequence[int] | None,
    ) -> list[EngineCoreRequest]:
        default = self.get_default_sampling_params()
        shared = default if params is None else params
        every = params_of_each(shared, len(prompts), (SamplingParams, BeamSearchParams), "sampling_params")
        priorities = priority_of_each(priority, len(prompts))
        requests = []
        given = made = None  # neighbours may share their parameters
        for index, (prompt, own, rank) in enumerate(zip(prompts, every, priorities, strict=True)):
            with named_in_errors(index, len(prompts)):
                own = default if own is None else own  # noqa: PLW2901
                if isinstance(own, SamplingParams | BeamSearchParams):
                    # The caller never sees unfinished outputs, so none are made.
                    if own is not given:
                        given, asked = own, own.sampling_params() if isinstance(own, BeamSearchParams) else own
                        made = engine_params(asked).with_output_kind(RequestOutputKind.FINAL_ONLY)
                    assert made is not None
                    own = made  # noqa: PLW2901
                elif isinstance(own, PoolingParams):
                    raise InvalidRequestError(
                        "sampling_params must be a SamplingParams, got PoolingParams, which embed() takes",
                        "sampling_params",
                    )
                requests.append(self.llm_engine.input_processor.process(prompt, own, rank))
        return requests
