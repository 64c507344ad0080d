"""Conversations that ``LLM.chat`` takes, and the prompts that a chat template makes of them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rustvllm.engine.llm_engine import LLMEngine
from rustvllm.engine.request.prompts import PromptType, TextPrompt, with_tokenization
from rustvllm.exceptions import ConfigError, InvalidRequestError
from rustvllm.offline.prompts import check_no_media, params_of_each
from rustvllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from rustvllm.text.chat_renderer import ChatRenderer

Messages = Sequence[Mapping[str, Any]]


def read_own_template(given: Any) -> str | None:
    """The chat template of an ``LLM``: ``given`` is its text or a file; None: the model's.

    Raises:
        ConfigError: It is neither, or the file cannot be read.
        InvalidRequestError: It is not valid Jinja.
    """
    from rustvllm.server.flags.serve_args import read_chat_template
    from rustvllm.text.chat_template import compile_chat_template

    if not isinstance(given, str | Path | None):
        raise ConfigError(f"chat_template must be a template or the path of one, got {type(given).__name__}")
    try:
        template = read_chat_template(None if given is None else str(given))
    except ConfigError as error:  # which names the flag of the server
        raise ConfigError(str(error).replace("--chat-template", "chat_template", 1)) from error
    if template is not None:
        compile_chat_template(template)
    return template


class Conversations:
    """Makes prompts of conversations for one engine.

    Args:
        engine: Has the tokenizer, and the model's own template.
        template: Instead of the model's; None: that.
    """

    def __init__(self, engine: LLMEngine, template: str | None = None) -> None:
        self._engine = engine
        self._template = template
        self._renderer: ChatRenderer | None = None

    def prompts(
        self,
        messages: Messages | Sequence[Messages],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PromptType]:
        """The prompts that the chat template makes of conversations; arguments as for ``LLM.chat``.

        Raises:
            InvalidRequestError: A message, template or option is wrong.
            ValueError: There is no tokenizer.
        """
        from rustvllm.server.endpoints.conversation import conversation_of
        from rustvllm.server.endpoints.message_images import images_of
        from rustvllm.text.chat_template import check_template_variables

        check_no_media(mm_processor_kwargs)
        check_chat_options(
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
        )
        variables = chat_template_kwargs or {}
        check_template_variables(variables)
        own_template = chat_template or self._template or self._models_template(has_tools=bool(tools))
        renderer = self._renderer_of(own_template)
        given = as_conversations(messages)
        vision, tokenizer = self._engine.config.model.vision, self._engine.get_tokenizer()
        images = [None if vision is None else images_of(tokenizer, vision.placeholder_ids) for _ in given]
        conversations = [
            conversation_of(conversation, renderer, chat_template_content_format, found)
            for conversation, found in zip(given, images, strict=True)
        ]
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **variables,
        }
        # A model's own template writes its special tokens itself; the plain one leaves them to the tokenizer.
        tokenization = {"add_special_tokens": not own_template, **(tokenization_kwargs or {})}
        prompts: list[PromptType] = []
        for conversation, found in zip(conversations, images, strict=True):
            text = renderer.render_blocking(renderer.prepare(conversation, options))
            if not text:
                raise InvalidRequestError("the chat template renders the messages as an empty prompt", "messages")
            prompt: TextPrompt = {"prompt": text}
            if found is not None and found.found:
                prompt["multi_modal_data"] = {"image": found.found}
            prompts.append(prompt)
        return with_tokenization(prompts, tokenization)

    def params(self, prompts: Sequence[PromptType], given: Any) -> Any:
        """Sampling parameters of conversations, in which ``structured_outputs`` leave thoughts free as chats do.

        Args:
            prompts: As :meth:`prompts` made them.
            given: ``sampling_params`` of ``LLM.chat``.

        Returns:
            Those of each prompt; None if none were given.

        Raises:
            InvalidRequestError: They are not sampling parameters, or not as many as there are prompts.
        """
        if given is None:
            return None
        every = params_of_each(given, len(prompts), (SamplingParams, BeamSearchParams), "sampling_params")
        thinking, made = self._engine.input_processor.thinking, list[Any]()
        before = changed = None
        for own, prompt in zip(every, prompts, strict=True):
            if not isinstance(own, SamplingParams) or own.structured_outputs is None:
                made.append(own)
                continue
            assert isinstance(prompt, Mapping)
            new = thinking.of_chat(own, prompt["prompt"])
            if own is before and changed is not None and new.structured_outputs == changed.structured_outputs:
                new = changed  # neighbours share what their parameters become
            before, changed = own, new
            made.append(new)
        return made

    def score_renderer(self, chat_template: str | None) -> "ChatRenderer | None":
        """Renders a call's template of pairs, or the ``LLM``'s; None if there is neither: a model's own is for chats.

        Raises:
            InvalidRequestError: It is not valid Jinja.
            ValueError: There is no tokenizer.
        """
        if not isinstance(chat_template, str | None):
            raise InvalidRequestError(
                f"chat_template must be text, got {type(chat_template).__name__}", "chat_template"
            )
        own = chat_template or self._template
        return self._renderer_of(own) if own else None

    def _models_template(self, *, has_tools: bool) -> str | None:
        tokenizer = self._engine.get_tokenizer()
        of_tools = getattr(tokenizer, "tool_template", None) if has_tools else None
        return of_tools or tokenizer.chat_template

    def _renderer_of(self, template: str | None) -> "ChatRenderer":
        """Renders ``template`` (None: the plain one); the last one is kept, with its processes."""
        from rustvllm.text.chat_renderer import ChatRenderer
        from rustvllm.text.chat_template import PLAIN_CHAT_TEMPLATE, special_tokens

        template = template or PLAIN_CHAT_TEMPLATE
        if self._renderer is None or self._renderer.template != template:
            self._renderer = ChatRenderer(template, special_tokens(self._engine.get_tokenizer()), "LLM.chat")
        return self._renderer


def check_chat_options(
    *,
    chat_template: Any,
    chat_template_content_format: Any,
    add_generation_prompt: Any,
    continue_final_message: Any,
    tools: Any,
    chat_template_kwargs: Any,
    tokenization_kwargs: Any,
) -> None:
    """Refuse options of ``LLM.chat`` of the wrong type, as the server does: a template would make a prompt of them.

    Raises:
        InvalidRequestError: Names the option.
    """
    if not isinstance(chat_template, str | None):
        raise InvalidRequestError(f"chat_template must be text, got {type(chat_template).__name__}", "chat_template")
    if chat_template_content_format not in ("auto", "string", "openai"):
        raise InvalidRequestError(
            f"chat_template_content_format must be auto, string or openai, got {chat_template_content_format!r:.80}",
            "chat_template_content_format",
        )
    flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InvalidRequestError(f"{name} must be True or False, got {flag!r:.80}", name)
    dicts = {"chat_template_kwargs": chat_template_kwargs, "tokenization_kwargs": tokenization_kwargs}
    for name, given in dicts.items():
        if not isinstance(given, Mapping | None):
            raise InvalidRequestError(f"{name} must be a dict, got {type(given).__name__}", name)
    if tools is None:
        return
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"tools must be a list of dicts, got {type(tools).__name__}", "tools")
    if not tools:
        raise InvalidRequestError("tools must not be an empty list; leave it out instead", "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"tools[{index}] must be a dict, got {type(tool).__name__}", "tools")


def as_conversations(messages: Any) -> list[Messages]:
    """One conversation or several, as a list; an iterator (a generator, say) may stand for any list."""
    if isinstance(messages, Iterator):
        messages = list(messages)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of messages, or a list of such lists", "messages")
    if isinstance(messages[0], Mapping):
        return [messages]
    return [list(each) if isinstance(each, Iterator) else each for each in messages]
