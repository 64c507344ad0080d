"""The chunks of a stream: the constant part is rendered once, then per event only what changed."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from rustvllm.entrypoints.openai.generation import Generation
from rustvllm.entrypoints.openai.protocol import GenerationRequest
from rustvllm.entrypoints.openai.sse import event, json_bytes, json_string
from rustvllm.entrypoints.openai.usage import UsageCounter
from rustvllm.outputs import RequestOutput


class ChunkRenderer:
    """Events of one completions or chat stream.

    Args:
        header: What every chunk starts with: id, object, created, model, system_fingerprint.
        text_key: Bytes between a choice's index and its text, for instance ``,"text":``.
        text_end: Bytes between the text and ``logprobs``.
        request: For its stream options.
        usage: The counter that the caller feeds.
        force_usage: Send the final usage whether or not it was asked for.
    """

    def __init__(
        self,
        header: dict[str, Any],
        text_key: bytes,
        text_end: bytes,
        request: GenerationRequest,
        usage: UsageCounter,
        *,
        force_usage: bool = False,
    ) -> None:
        options = request.stream_options
        self._header = header
        self._usage = usage
        self.include_usage = force_usage or bool(options and options.include_usage)
        self.continuous_usage = self.include_usage and bool(options and options.continuous_usage_stats)
        self._start = b"data: " + json_bytes(header)[:-1] + b',"choices":[{"index":'
        self._text_key = text_key
        self._text_end = text_end
        end = b',"usage":null}\n\n' if self.include_usage else b"}\n\n"
        self._end = b"]" + end
        self._unfinished = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def text(self, index: int, text: str) -> bytes:
        """A chunk that adds ``text`` to choice ``index``."""
        return b"".join(
            (
                self._start,
                b"%d" % index,
                self._text_key,
                json_string(text),
                self._text_end,
                self._unfinished,
                self._tail(),
            )
        )

    def finish(self, index: int, text: str, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of choice ``index``, with its last text."""
        end = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            json_string(finish_reason),
            json_bytes(stop_reason),
        )
        return b"".join(
            (
                self._start,
                b"%d" % index,
                self._text_key,
                json_string(text),
                self._text_end,
                end,
                self._tail(),
            )
        )

    def raw(self, index: int, fields: bytes) -> bytes:
        """A chunk of an unfinished choice with ``fields`` (JSON members with their leading comma) in place of text."""
        return b"".join((self._start, b"%d" % index, fields, self._unfinished, self._tail()))

    def final_usage(self) -> bytes:
        """The extra chunk without choices; empty when it was not asked for."""
        if not self.include_usage:
            return b""
        return event({**self._header, "choices": [], "usage": self._usage.as_dict()})

    def _tail(self) -> bytes:
        if self.continuous_usage:
            return b'],"usage":' + json_bytes(self._usage.as_dict()) + b"}\n\n"
        return self._end


async def stream_events(
    generation: Generation,
    chunks: ChunkRenderer,
    usage: UsageCounter,
    num_prompts: int,
    n: int,
    opening: Callable[[int, RequestOutput], list[bytes]],
) -> AsyncGenerator[bytes, None]:
    """Events of one stream, joined where several are there at once.

    Args:
        generation: Where outputs come from.
        chunks: Renders them.
        usage: Counts them.
        num_prompts: Prompts of the request.
        n: Samples per prompt; choice ``prompt · n + sample`` is numbered so.
        opening: Chunks that the choices of a prompt begin with. They go out with its first output and not before it:
            clients take the first event's time for the time to first token.
    """
    unopened = set(range(num_prompts))
    unfinished = set(range(num_prompts * n))
    async for prompt_index, output in generation:
        usage.add(prompt_index, output)
        events = []
        if prompt_index in unopened:
            unopened.discard(prompt_index)
            events = opening(prompt_index, output)
        for completion in output.outputs:
            index = prompt_index * n + completion.index
            if completion.finish_reason is not None:
                unfinished.discard(index)
                events.append(chunks.finish(index, completion.text, completion.finish_reason, completion.stop_reason))
            elif completion.text or chunks.continuous_usage:
                events.append(chunks.text(index, completion.text))
        if events:
            yield b"".join(events)
    for index in sorted(unfinished):  # the engine let go of it without a word: it was aborted
        yield chunks.finish(index, "", "abort", None)
    if last := chunks.final_usage():
        yield last
