"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``: Anthropic's API, over the same pipeline as chat."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rustvllm.exceptions import InvalidRequestError
from rustvllm.outputs import CompletionOutput, PromptIds, RequestOutput
from rustvllm.server.answers.message import Ending, message_content, message_usage
from rustvllm.server.answers.turn import REASONING_FIELDS
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.endpoints.chat import ChatFace
from rustvllm.server.endpoints.conversation import adds_special_tokens, render_prompt
from rustvllm.server.endpoints.message_blocks import chat_request
from rustvllm.server.endpoints.message_images import images_of
from rustvllm.server.endpoints.pipeline import respond
from rustvllm.server.endpoints.tokenization import check_size, tokenizer_of
from rustvllm.server.schemas.messages import CountTokensRequest, MessagesRequest
from rustvllm.server.schemas.protocol import ChatCompletionRequest
from rustvllm.server.schemas.request_body import at_size, read_request
from rustvllm.server.state import ServerState
from rustvllm.server.stream.chunks import ChunkRenderer
from rustvllm.server.stream.generation import unless_left
from rustvllm.server.stream.message_events import MessageEventRenderer

_SENT_AS: Final = {
    "function.parameters": "input_schema",
    "function.name": "name",
    "function.strict": "strict",
    "response_format": "output_config.format",
    "json_schema.schema": "schema",
    "thinking_token_budget": "thinking.budget_tokens",
    "leave it out, and limit the answer": 'set thinking to {"type": "adaptive"}, and limit the answer',
}
"""Names within fields in chat's errors, and what these are called here."""
_FIELDS: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "structured_outputs": "output_config",
    "thinking_token_budget": "thinking",
    "user": "metadata",
    "image_url": "messages",
    "prompt": "messages",
}
"""Fields of chat, and those of this API that they were made of."""


async def create_message(raw_request: Request) -> Response:
    """Answer a conversation."""
    return await respond(raw_request, MessagesFace)


async def count_tokens(raw_request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    state: ServerState = raw_request.app.state.server
    body = await read_request(raw_request, CountTokensRequest)
    run = partial(at_size, raw_request)
    request = await run(partial(chat_request, body))
    model = state.model
    await model.refresh_adapters(request.model)
    model.resolve_name(request.model)
    tokenizer = tokenizer_of(model)
    images = None if model.image_ids is None else images_of(tokenizer, model.image_ids)
    text = await unless_left(raw_request, render_prompt(request, state, model, run, images=images))
    check_size(text, model, "messages")
    ids = await unless_left(raw_request, tokenizer.encode_off_loop(text, adds_special_tokens(None, model)))
    try:
        found = () if images is None else images.found
        counting = model.engine.input_processor.num_tokens_off_loop(ids, found)
        num_tokens = await unless_left(raw_request, counting, takes_long=bool(found))
    except InvalidRequestError as error:
        raise _as_sent(error) from None
    return JSONResponse({"input_tokens": num_tokens})


class MessagesFace(ChatFace):
    """A conversation of blocks that goes on with a message."""

    shape = MessagesRequest
    is_translated = True
    id_prefix = "msg_"

    @classmethod
    def translate(cls, body: Any) -> ChatCompletionRequest:
        return chat_request(body)

    def max_tokens(self) -> tuple[int | None, str]:
        """Clients of this API must send a limit, and send large ones: what does not fit is as much as fits."""
        asked = self.request.max_tokens
        return None if asked is None else min(asked, self.model.max_model_len), "max_tokens"

    def read_fields(self) -> None:
        budget, formats = self.request.thinking_token_budget, self.model.turn_formats
        if budget is not None and formats.reasoning_ids is None:
            most, _ = self.max_tokens()
            if formats.reasoning is None or (most is not None and budget >= most - 1):
                self.request.thinking_token_budget = None  # the answer ends before its thoughts exceed the budget
        super().read_fields()

    def as_sent(self, error: InvalidRequestError) -> InvalidRequestError:
        return _as_sent(error)

    def opening(self, chunks: ChunkRenderer, prompt_index: int, prompt_ids: PromptIds) -> bytes:  # noqa: ARG002
        assert isinstance(chunks, MessageEventRenderer)
        return chunks.begin(len(prompt_ids))

    def chunk_renderer(self, header: dict[str, Any], usage: UsageCounter) -> ChunkRenderer:
        chunks = self.make_renderer(MessageEventRenderer, header, usage)
        chunks.readers, chunks.max_tokens = self._readers, self.request.max_tokens or 0
        return chunks

    def whole(
        self,
        header: dict[str, Any],
        usage: UsageCounter,
        outputs: Sequence[RequestOutput],
        samples: Sequence[CompletionOutput],
    ) -> dict[str, Any]:
        [output], [sample] = outputs, samples
        usage.add(0, output)
        deltas: list[dict[str, Any]] = [{"content": sample.text}]
        has_calls = False
        if self._readers is not None:
            reader = self._readers[0]
            deltas = [*reader.read(sample.text, sample.token_ids), *reader.finish()]
            has_calls = reader.num_calls > 0
        is_long = usage.completion_tokens >= (self.request.max_tokens or 0)
        counts = usage.as_dict()
        cached = counts.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "id": header["id"],
            "type": "message",
            "role": "assistant",
            "model": header["model"],
            "content": message_content(deltas),
            **Ending(sample.finish_reason, sample.stop_reason, has_calls, is_long).as_dict(),
            "usage": message_usage(counts["prompt_tokens"], counts["completion_tokens"], cached),
        }

    def _reasoning_fields(self) -> Sequence[str]:
        return REASONING_FIELDS["reasoning"]


def _as_sent(error: InvalidRequestError) -> InvalidRequestError:
    """The error with the names of this API; its errors have no member for the field, so the text names it."""
    text, field = str(error), error.param
    for chats, own in _SENT_AS.items():
        text = text.replace(chats, own)
    if field is not None:
        own = _FIELDS.get(field, field)
        if text.startswith(f"{field} "):
            text = own + text.removeprefix(field)
        elif own not in text:
            text = f"{own}: {text}"
        field = own
    return InvalidRequestError(text, field)
