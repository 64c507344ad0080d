""":class:`MessageEventRenderer`: the events of a stream of Anthropic's Messages API.

An answer is a row of blocks, each of which begins, grows and ends. The core makes the events of an answer that is text
alone; where thoughts and calls are read, they are made here.
"""

from typing import Any, ClassVar, Final, Literal

from rustvllm.outputs import CompletionOutput
from rustvllm.server.answers.message import Ending, message_usage, new_block
from rustvllm.server.answers.turn import TurnReaders
from rustvllm.server.error_bodies import MESSAGES_PATH
from rustvllm.server.errors import error_body
from rustvllm.server.stream.chunks import ChunkRenderer
from rustvllm.server.stream.sse import json_bytes, json_string

_TEXT_DELTA: Final = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":',
    b"}}\n\n",
)


def event(kind: str, **members: Any) -> bytes:
    """One whole event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_bytes({"type": kind, **members}))


class MessageEventRenderer(ChunkRenderer):
    """Events of one stream.

    Attributes:
        readers: Of the answer; None: it is text alone. Set before the first event, as what follows.
        max_tokens: Most tokens that were asked for.
    """

    end: ClassVar[bytes] = b""
    readers: TurnReaders | None = None
    max_tokens: int = 0
    _index: int = -1  # of the newest block
    _kind: str | None = None  # of the block that is open

    @property
    def is_core_rendered(self) -> bool:
        return self.readers is None

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The events that a message begins with."""
        usage = message_usage(num_prompt_tokens, 0, 0)
        message = {
            "id": self._header["id"],
            "type": "message",
            "role": "assistant",
            "model": self._header["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return event("message_start", message=message)

    def template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event of choice ``index``, the only one."""
        before, after = _TEXT_DELTA
        return before % index, after

    def before_text(self) -> bytes:
        return self._within("text")

    def wants_chunk(self, completion: CompletionOutput) -> bool:
        return bool(completion.text or completion.token_ids)

    def text(self, index: int, text: str, completion: CompletionOutput) -> bytes:
        if self.readers is None:
            return self.before_text() + self._text_event(text) if text else b""
        return b"".join(map(self._grown, self.readers[index].read(text, completion.token_ids)))

    def finish(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: int | str | None,
        completion: CompletionOutput | None = None,
    ) -> bytes:
        """The last events of the answer, and those that end the message."""
        has_calls = False
        if self.readers is None:
            events = [self.before_text(), self._text_event(text)] if text else []
        else:
            reader = self.readers[index]
            deltas = [*reader.read(text, () if completion is None else completion.token_ids), *reader.finish()]
            events = [self._grown(delta) for delta in deltas]
            has_calls = reader.num_calls > 0
        is_long = self._usage.completion_tokens >= self.max_tokens
        delta = Ending(finish_reason, stop_reason, has_calls, is_long).as_dict()
        events += [
            self._close(),
            event("message_delta", delta=delta, usage=self._usage_so_far()),
            event("message_stop"),
        ]
        return b"".join(events)

    def error(self, exc: BaseException) -> bytes:
        return b"event: error\ndata: %b\n\n" % json_bytes(error_body(exc, MESSAGES_PATH))

    def final_usage(self) -> bytes:
        return b""

    def _usage_so_far(self) -> dict[str, int]:
        usage = self._usage.as_dict()
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return message_usage(usage["prompt_tokens"], usage["completion_tokens"], cached)

    def _text_event(self, text: str) -> bytes:
        before, after = self.template(self._index)
        return b"".join((before, json_string(text), after)) if text else b""

    def _grown(self, delta: dict[str, Any]) -> bytes:
        """The events of a delta of the answer."""
        if (text := delta.get("content")) is not None:
            return self._within("text") + self._text_event(text)
        if "tool_calls" not in delta:
            thought = next(iter(delta.values()))
            return self._within("thinking") + self._block_delta(type="thinking_delta", thinking=thought)
        [call] = delta["tool_calls"]
        opened = b""
        if "id" in call:
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            opened = self._close() + self._open(block)
        arguments = call["function"]["arguments"]
        return opened + (self._block_delta(type="input_json_delta", partial_json=arguments) if arguments else b"")

    def _within(self, kind: Literal["text", "thinking"]) -> bytes:
        """The events after which a block of this kind is open."""
        return b"" if self._kind == kind else self._close() + self._open(new_block(kind))

    def _open(self, block: dict[str, Any]) -> bytes:
        self._index, self._kind = self._index + 1, block["type"]
        return event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return event("content_block_stop", index=self._index)

    def _block_delta(self, **delta: Any) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)
