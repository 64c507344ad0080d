"""``POST /v1/chat/completions``."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from rustvllm.exceptions import InvalidRequestError
from rustvllm.outputs import CompletionOutput, PromptIds, RequestOutput
from rustvllm.sampling_params.structured_outputs import GatedOutputs
from rustvllm.server.answers import nulls
from rustvllm.server.answers.logprobs import chat_logprobs, shown_prompt_logprobs
from rustvllm.server.answers.turn import REASONING_FIELDS, TurnReaders, TurnReading
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.endpoints.conversation import (
    adds_special_tokens,
    answering_role,
    echoed_message,
    predicted_text,
    render_prompt,
)
from rustvllm.server.endpoints.message_images import images_of
from rustvllm.server.endpoints.pipeline import Face, Run, respond
from rustvllm.server.endpoints.tools import ToolUse, call_grammar, check_wanted, read_tool_use
from rustvllm.server.flags.answer_args import MAX_THINKING_TOKENS
from rustvllm.server.schemas.protocol import ChatCompletionRequest
from rustvllm.server.schemas.refusals import CHAT_REFUSALS
from rustvllm.server.stream.chunks import ChunkRenderer
from rustvllm.server.stream.sse import json_string
from rustvllm.server.stream.turn_chunks import TurnChunkRenderer

if TYPE_CHECKING:
    from rustvllm.engine.request.prompts import TextPrompt


async def create_chat_completion(raw_request: Request) -> Response:
    """Answer a conversation."""
    return await respond(raw_request, ChatFace)


class ChatFace(Face[ChatCompletionRequest]):
    """A conversation that goes on with a message."""

    shape: ClassVar[type[BaseModel]] = ChatCompletionRequest
    refusals = CHAT_REFUSALS
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    text_frame = (b',"delta":{"content":', b"}")
    chunk_nulls = b""
    answer_nulls = nulls.CHAT_ANSWER
    choice_nulls = nulls.CHAT_CHOICE
    _tool_use: ToolUse | None = None
    _readers: TurnReaders | None = None

    def max_tokens(self) -> tuple[int | None, str]:
        request, model = self.request, self.model
        param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        asked = getattr(request, param)
        if asked is None:
            default = model.default_max_tokens
            return (None if default is None else min(default, model.max_model_len)), param
        if asked < 1:
            raise InvalidRequestError(f"{param} must be at least 1, got {asked}.", param)
        return asked, param

    def num_logprobs(self) -> int | None:
        if not self.request.logprobs and not self.request.top_logprobs:
            return None
        self.logprobs = chat_logprobs(self.request, self.model)
        return self.request.top_logprobs or 0

    def check(self) -> None:
        """Read what the request says of tools."""
        if self.request.tools is None and self.request.tool_choice is None:
            return
        constraint = self.state.settings.tool_call_constraint
        self._tool_use = read_tool_use(self.request, self.model.turn_formats, constraint)
        if self._tool_use is not None:
            check_wanted(self._tool_use, self.params.structured_outputs)

    async def prompts(self, run: Run) -> list["TextPrompt"]:
        request = self.request
        hides_tools = request.tool_choice == "none" and self.state.settings.exclude_tools_when_tool_choice_none
        image_ids = self.model.image_ids
        images = None if image_ids is None else images_of(self.model.tokenizer, image_ids)
        text = await render_prompt(request, self.state, self.model, run, hides_tools=hides_tools, images=images)
        if not text:
            raise InvalidRequestError("The chat template renders these messages as an empty prompt.", "messages")
        await run(partial(self._prepare_turns, text))
        self._role = answering_role(request, self.state)
        self._echoed = echoed_message(request, self._role)
        prompt: TextPrompt = {
            "prompt": text,
            "add_special_tokens": adds_special_tokens(request.add_special_tokens, self.model),
        }
        if images is not None and images.found:
            prompt["multi_modal_data"] = {"image": images.found}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        if request.prediction is not None:
            prompt["prediction"] = await run(partial(predicted_text, request.prediction))
        return [prompt]

    def opening(self, chunks: ChunkRenderer, prompt_index: int, prompt_ids: PromptIds) -> bytes:  # noqa: ARG002
        ids = list(prompt_ids) if self.request.return_token_ids else None
        delta = b',"delta":{"role":%b,"content":""}' % json_string(self._role)
        choices = range(self.params.n)
        roles = chunks.raw(choices, delta, ids)
        return roles + chunks.said(choices, self._echoed) if self._echoed else roles

    def choice(self, prompt_index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:  # noqa: ARG002
        message: dict[str, Any] = {"content": sample.text}
        if self._readers is not None:
            message = self._readers[sample.index].message(sample.text, sample.token_ids)
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        return {
            "message": {**nulls.CHAT_MESSAGE, "role": self._role, **message},
            "logprobs": None if self.logprobs is None else self.logprobs(sample),
        }

    def finish_reason(self, sample: CompletionOutput) -> str | None:
        reason = sample.finish_reason
        return self._readers[sample.index].finish_reason(reason) if self._readers is not None and reason else reason

    def chunk_renderer(self, header: dict[str, Any], usage: UsageCounter) -> ChunkRenderer:
        if self._readers is None:
            return super().chunk_renderer(header, usage)
        chunks = self.make_renderer(TurnChunkRenderer, header, usage)
        chunks.read_with(self._readers)
        return chunks

    def new_usage(self) -> UsageCounter:
        usage = super().new_usage()
        usage.show_predicted = self.request.prediction is not None
        readers = self._readers
        if readers is not None and self.model.turn_formats.reasoning_ids is not None:
            usage.count_reasoning = lambda: readers.num_reasoning_tokens
        return usage

    def _prepare_turns(self, prompt: str) -> None:
        """Make what reads the answers, and the grammar that their calls obey."""
        use, formats, wanted = self._tool_use, self.model.turn_formats, self.params.structured_outputs
        budget = self._thinking_budget()
        if use is None and formats.reasoning is None:
            return
        begins_within = formats.begins_within(prompt)
        if use is None and wanted is not None:
            whole = formats.behind_thoughts(wanted, prompt, budget)
            if whole is wanted:
                return  # what the answer must be holds from its first token on: it has no thoughts
            self.params = replace(self.params, structured_outputs=whole)
        else:
            if use is not None:
                if use.must_call or begins_within or not formats.continues_message(prompt):
                    wanted = call_grammar(
                        use, formats, wanted, begins_within=begins_within, is_gated=budget is not None
                    )
                self.params = replace(self.params, structured_outputs=wanted)
            gate = None if budget is None else formats.thinking_gate(prompt, budget)
            if gate is not None:
                self.params = replace(self.params, structured_outputs=GatedOutputs(gate=gate, answer=wanted))
        if formats.marker_ids:
            self.params = replace(self.params, skip_special_tokens=False)
        reading = TurnReading(
            formats=formats,
            tools=None if use is None else use.tools,
            is_parallel=use is None or use.is_parallel,
            tells_calls=use is not None and use.mode != "named",
            begins_within=begins_within,
            reasoning_fields=() if self.request.include_reasoning is False else self._reasoning_fields(),
            thinks_once=use is None and wanted is not None,
        )
        self._readers = TurnReaders(reading)
        if use is not None and not use.is_parallel and not use.must_call:  # where it must, the grammar ends it
            self.ends_after_call = self._readers.core_reading

    def _reasoning_fields(self) -> Sequence[str]:
        return REASONING_FIELDS[self.state.settings.reasoning_field]

    def _thinking_budget(self) -> int | None:
        """Most tokens of thoughts; None: any number.

        Raises:
            InvalidRequestError: The request has a budget, and the server cannot tell the thoughts of its model.
        """
        asked = self.request.thinking_token_budget
        if asked is None:
            return self.state.settings.default_thinking_token_budget
        if not 0 <= asked <= MAX_THINKING_TOKENS:
            if asked == -1:
                return None
            raise InvalidRequestError(
                f"thinking_token_budget must be -1 to {MAX_THINKING_TOKENS}, got {asked}.", "thinking_token_budget"
            )
        if self.model.turn_formats.reasoning_ids is None:
            raise InvalidRequestError(
                "thinking_token_budget needs a model that marks its reasoning with single tokens, as the chat "
                "template or --reasoning-parser shows; leave it out, and limit the answer with max_tokens.",
                "thinking_token_budget",
            )
        return asked

    def add_prompt_facts(self, answer: dict[str, Any], outputs: Sequence[RequestOutput]) -> None:
        [output] = outputs
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        if self.request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = shown_prompt_logprobs(
                self.request, output.prompt_token_ids, output.prompt_logprobs
            )
