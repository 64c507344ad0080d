""":class:`TurnChunkRenderer`: the chunks of a chat stream whose answers are read for thoughts and tool calls.

The core reads and renders them, but for those that hold more than a delta.
"""

from typing import Any

from rustvllm.outputs import CompletionOutput
from rustvllm.server.answers.turn import TurnReaders
from rustvllm.server.stream.chunks import ChunkRenderer
from rustvllm.server.stream.sse import json_bytes

_SAYS_NOTHING = b',"delta":{}'


class TurnChunkRenderer(ChunkRenderer):
    """Chunks of content, thoughts and calls: one each, in their order.

    Log-probabilities and token ids go with the last chunk of the text that they belong to.

    Attributes:
        readers: Of each choice; set before the first chunk.
    """

    readers: TurnReaders

    def read_with(self, readers: TurnReaders) -> None:
        """How the answers are read."""
        self.readers = readers
        self.turn_reading = readers.core_reading

    def template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the delta in a chunk of choice ``index``."""
        before, after = super().template(index)
        return before.removesuffix(self._text_key), after.removeprefix(self._text_end)

    def note_calls(self, index: int, num_calls: int) -> None:
        self.readers[index].num_calls = num_calls

    def text(self, index: int, text: str, completion: CompletionOutput) -> bytes:
        """Chunks of what ``text`` adds to choice ``index``; none where it is not decided yet what it is."""
        deltas = self.readers[index].read(text, completion.token_ids)
        says_more = self._says_more and bool(completion.token_ids)
        if not deltas and not says_more and not self.continuous_usage:
            return b""
        fields = [self._delta(delta) for delta in deltas] or [_SAYS_NOTHING]
        before = [self._rest(delta, b"null", extra=self._ids(None)) for delta in fields[:-1]]
        top = self._timed() if self._times_each else b""
        last = self._rest(fields[-1], self._shown_logprobs(completion), extra=self._ids(completion), top=top)
        return b"".join(b"%b%d%b" % (self._start, index, rest) for rest in [*before, last])

    def finish(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: int | str | None,
        completion: CompletionOutput | None = None,
    ) -> bytes:
        """The last chunks of choice ``index``: what was held back, and then the end."""
        reader = self.readers[index]
        deltas = [*reader.read(text, () if completion is None else completion.token_ids), *reader.finish()]
        before = [self._rest(self._delta(delta), b"null", extra=self._ids(None)) for delta in deltas]
        end = reader.finish_reason(finish_reason)
        said = b"".join(b"%b%d%b" % (self._start, index, rest) for rest in before)
        return said + self._end_of(index, _SAYS_NOTHING, end, stop_reason, completion)

    @staticmethod
    def _delta(delta: dict[str, Any]) -> bytes:
        return b',"delta":' + json_bytes(delta)
