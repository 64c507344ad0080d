"""``POST /v1/responses``, and what asks for a response that was stored, of which there is none."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import Request
from starlette.responses import Response

from rustvllm.exceptions import InvalidRequestError
from rustvllm.outputs import CompletionOutput, PromptIds, RequestOutput
from rustvllm.server.answers.response_items import ItemReader, whole_items
from rustvllm.server.answers.response_object import Echo, ResponseFrame, outcome_of
from rustvllm.server.answers.turn import TurnReader
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.endpoints.chat import ChatFace
from rustvllm.server.endpoints.pipeline import Run, respond
from rustvllm.server.endpoints.response_input import AskedResponse, as_chat, custom_names, in_their_words
from rustvllm.server.errors import ResponseNotFoundError
from rustvllm.server.schemas.protocol import ChatCompletionRequest
from rustvllm.server.schemas.refusals import RESPONSES_REFUSALS
from rustvllm.server.schemas.responses_request import ResponsesRequest
from rustvllm.server.stream.chunks import ChunkRenderer
from rustvllm.server.stream.response_events import ResponseEventRenderer

if TYPE_CHECKING:
    from rustvllm.engine.request.prompts import TextPrompt


async def create_response(raw_request: Request) -> Response:
    """Answer a conversation with a response."""
    return await respond(raw_request, ResponsesFace)


async def stored_response(response_id: str) -> Response:
    """Say that there is no stored response.

    Raises:
        ResponseNotFoundError: Always.
    """
    raise ResponseNotFoundError(response_id.removesuffix("/input_items"))


class ResponsesFace(ChatFace):
    """A conversation that goes on with a response."""

    shape = ResponsesRequest
    is_translated = True
    refusals = RESPONSES_REFUSALS
    id_prefix = "resp_"
    kind = chunk_kind = "response"
    _echo: Echo

    @classmethod
    def translate(cls, body: Any) -> ChatCompletionRequest:
        return as_chat(body)

    @property
    def asked(self) -> ResponsesRequest:
        """The body."""
        return cast("AskedResponse", self.request).asked

    def max_tokens(self) -> tuple[int | None, str]:
        asked = self.asked.max_output_tokens
        if asked is None:
            return super().max_tokens()[0], "max_output_tokens"
        if asked < 1:
            raise InvalidRequestError(f"max_output_tokens must be at least 1, got {asked}.", "max_output_tokens")
        return asked, "max_output_tokens"

    async def prompts(self, run: Run) -> list["TextPrompt"]:
        prompts = await super().prompts(run)
        self._echo = await run(lambda: Echo(self.asked, self.params))
        return prompts

    def as_sent(self, error: InvalidRequestError) -> InvalidRequestError:
        return in_their_words(error)

    @property
    def num_echoed_bytes(self) -> int:
        return len(self._echo.json)

    def new_usage(self) -> UsageCounter:
        usage = super().new_usage()
        usage.show_cached = True  # this API always shows it
        return usage

    def chunk_renderer(self, header: dict[str, Any], usage: UsageCounter) -> ChunkRenderer:
        events = self.make_renderer(ResponseEventRenderer, header, usage)
        events.show(ResponseFrame(header, self._echo), self._reader(), custom_names(self.asked))
        return events

    def opening(self, chunks: ChunkRenderer, prompt_index: int, prompt_ids: PromptIds) -> bytes:  # noqa: ARG002
        return cast("ResponseEventRenderer", chunks).opening()

    def whole(
        self,
        header: dict[str, Any],
        usage: UsageCounter,
        outputs: Sequence[RequestOutput],
        samples: Sequence[CompletionOutput],
    ) -> dict[str, Any]:
        [output], [sample] = outputs, samples
        usage.add(0, output)
        outcome, items = outcome_of(sample.finish_reason), self._items()
        steps = [*items.read(sample), *items.finish(is_whole=outcome.status == "completed")]
        return ResponseFrame(header, self._echo).whole(outcome, whole_items(steps), usage)

    def _items(self) -> ItemReader:
        return ItemReader(self._reader(), custom_names(self.asked), self.logprobs)

    def _reader(self) -> TurnReader | None:
        return None if self._readers is None else self._readers[0]

    def _reasoning_fields(self) -> Sequence[str]:
        return ("reasoning",)
