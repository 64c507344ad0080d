"""The chunks of a stream: the constant part is rendered once, then per event only what changed.

Most events are made by the core from :meth:`ChunkRenderer.template` and never come here. Rendered in Python are the
opening, each choice's end, and streams whose chunks hold more than text.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from rustvllm.entrypoints.openai.event_writer import EventWriter
from rustvllm.entrypoints.openai.generation import Generation
from rustvllm.entrypoints.openai.logprobs import LogprobsRenderer
from rustvllm.entrypoints.openai.protocol import GenerationRequest
from rustvllm.entrypoints.openai.sse import event, json_bytes, json_string
from rustvllm.entrypoints.openai.timings import Timings, prompt_progress
from rustvllm.entrypoints.openai.usage import UsageCounter
from rustvllm.outputs import CompletionOutput, RequestOutput


class ChunkRenderer:
    """Events of one completions or chat stream.

    Args:
        header: What every chunk starts with: id, object, created, model, system_fingerprint.
        text_key: Bytes between a choice's index and its text, for instance ``,"text":``.
        text_end: Bytes between the text and ``logprobs``.
        request: For its stream options, and for what else its chunks are to hold.
        usage: The counter that the caller feeds.
        logprobs: How to show log-probabilities; None: not at all.
        force_usage: Send the final usage whether or not it was asked for.
    """

    def __init__(
        self,
        header: dict[str, Any],
        text_key: bytes,
        text_end: bytes,
        request: GenerationRequest,
        usage: UsageCounter,
        logprobs: LogprobsRenderer | None = None,
        *,
        force_usage: bool = False,
    ) -> None:
        options = request.stream_options
        self._header = header
        self._usage = usage
        self._logprobs = logprobs
        self._shows_token_ids = bool(request.return_token_ids)
        self._shows_progress = bool(request.return_progress)
        self._times_each = bool(request.timings_per_token)
        self.timings = Timings(request.n or 1) if request.timings or self._times_each else None
        self.include_usage = force_usage or bool(options and options.include_usage)
        self.continuous_usage = self.include_usage and bool(options and options.continuous_usage_stats)
        self._start = b"data: " + json_bytes(header)[:-1] + b',"choices":[{"index":'
        self._text_key = text_key
        self._text_end = text_end
        # A choice that says nothing yet: chat's role comes with the opening, and clients join what comes twice.
        self._nothing = b',"delta":{}' if text_end else text_key + b'""'
        self._end = b',"usage":null}\n\n' if self.include_usage else b"}\n\n"

    @property
    def is_core_rendered(self) -> bool:
        """Whether the core can make the chunks of :meth:`template`, which hold text and nothing else."""
        return (
            self._logprobs is None
            and not self.continuous_usage
            and not self._shows_token_ids
            and not self._times_each
            and not self._shows_progress
        )

    def wants_chunk(self, completion: CompletionOutput) -> bool:
        """Whether there is anything to say of a choice that goes on."""
        says_more = self._logprobs is not None or self._shows_token_ids
        return bool(completion.text) or self.continuous_usage or (says_more and bool(completion.token_ids))

    def template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in a chunk of choice ``index`` that has no usage of its own."""
        before = b"".join((self._start, b"%d" % index, self._text_key))
        after = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'
        return before, b"".join((self._text_end, after, self._end))

    def text(self, index: int, text: str, completion: CompletionOutput) -> bytes:
        """A chunk that adds ``text`` to choice ``index``, with what ``completion`` has beside it."""
        top = self._timed() if self._times_each else b""
        return self._chunk(index, self._text(text), self._beside(completion), extra=self._ids(completion), top=top)

    def echo(
        self, index: int, text: str, logprobs: dict[str, Any] | None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """A chunk with the prompt and its log-probabilities, before anything else of choice ``index``.

        ``prompt_token_ids``, when they were asked for, are the choice's own.
        """
        extra = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + json_bytes(prompt_token_ids)
        return self._chunk(index, self._text(text), json_bytes(logprobs), extra=extra)

    def finish(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: int | str | None,
        completion: CompletionOutput | None = None,
    ) -> bytes:
        """The last chunk of choice ``index``, with its last text."""
        return self._chunk(
            index,
            self._text(text),
            self._beside(completion),
            json_string(finish_reason),
            json_bytes(stop_reason),
            extra=self._ids(completion),
            top=self._timed(),
        )

    def raw(self, index: int, fields: bytes, prompt_token_ids: list[int] | None = None) -> bytes:
        """A chunk of an unfinished choice with ``fields`` (JSON members with their leading comma) in place of text.

        ``prompt_token_ids``, when they were asked for, are the chunk's.
        """
        top = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + json_bytes(prompt_token_ids)
        return self._chunk(index, fields, b"null", top=top)

    def said(self, index: int, text: str) -> bytes:
        """A chunk of an unfinished choice with text that was there before anything was generated."""
        return self._chunk(index, self._text(text), b"null")

    def progress(self, index: int, output: RequestOutput) -> bytes:
        """A chunk that says how far a prompt is; empty when that was not asked for, or has not changed."""
        shown = prompt_progress(output) if self._shows_progress else None
        if shown is None:
            return b""
        return self._chunk(index, self._nothing, b"null", top=b',"prompt_progress":' + json_bytes(shown))

    def final_usage(self) -> bytes:
        """The extra chunk without choices; empty when it was not asked for."""
        if not self.include_usage:
            return b""
        return event({**self._header, "choices": [], "usage": self._usage.as_dict()})

    def _chunk(
        self,
        index: int,
        fields: bytes,
        logprobs: bytes,
        finish_reason: bytes = b"null",
        stop_reason: bytes = b"null",
        *,
        extra: bytes = b"",
        top: bytes = b"",
    ) -> bytes:
        """One event; ``extra`` ends the choice, ``top`` stands behind the choices."""
        choice = b'%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}]%b' % (
            fields,
            logprobs,
            finish_reason,
            stop_reason,
            extra,
            top,
        )
        end = b',"usage":' + json_bytes(self._usage.as_dict()) + b"}\n\n" if self.continuous_usage else self._end
        return b"".join((self._start, b"%d" % index, choice, end))

    def _text(self, text: str) -> bytes:
        return b"".join((self._text_key, json_string(text), self._text_end))

    def _beside(self, completion: CompletionOutput | None) -> bytes:
        if self._logprobs is None or completion is None or not completion.token_ids:
            return b"null"
        return json_bytes(self._logprobs(completion))

    def _ids(self, completion: CompletionOutput | None) -> bytes:
        if not self._shows_token_ids:
            return b""
        return b',"token_ids":' + json_bytes([] if completion is None else completion.token_ids)

    def _timed(self) -> bytes:
        return b"" if self.timings is None else b',"timings":' + json_bytes(self.timings.as_dict())


class PromptEvents:
    """The events of one prompt's choices on their way to the client; the first of them takes the opening along.

    The opening goes out with the first output and not before it: clients take the first event's time for the time to
    first token.

    Args:
        writer: Where they go.
        templates: Of each choice; see :class:`~rustvllm.engine.request_state.EventSink`.
    """

    def __init__(self, writer: EventWriter, templates: Sequence[tuple[bytes, bytes]]) -> None:
        self.templates = templates
        self._writer = writer
        self._open: Callable[[], bytes] | None = None

    def open_with(self, opening: Callable[[], bytes]) -> None:
        """Chunks that the choices begin with; made when they are needed."""
        self._open = opening

    def write(self, event: bytes) -> bool:
        """Send an event; whether more can be taken now."""
        if self._open is not None:
            event = self.opening() + event
        return self._writer.write(event)

    def opening(self) -> bytes:
        """What has to go before the next event: the opening, once."""
        make, self._open = self._open, None
        return b"" if make is None else make()


class ChunkStream:
    """One completions or chat stream: how its chunks look, and what stands before them.

    Args:
        chunks: Renders them.
        usage: Counts them.
        n: Samples per prompt; choice ``prompt · n + sample`` is numbered so.
        num_prompts: Prompts of the request.
        opening: Given a prompt's index and token ids, the chunks that its choices begin with.
        look_at: Called with each output, and the index of its prompt, before anything is made of it.
    """

    def __init__(
        self,
        chunks: ChunkRenderer,
        usage: UsageCounter,
        n: int,
        num_prompts: int,
        opening: Callable[[int, list[int]], bytes],
        look_at: Callable[[int, RequestOutput], None] = lambda _index, _output: None,
    ) -> None:
        self._chunks = chunks
        self._usage = usage
        self._n = n
        self._opening = opening
        self._look_at = look_at
        self.writer = EventWriter(self._resume)
        self._generation: Generation | None = None
        self._prompts = [
            PromptEvents(self.writer, [chunks.template(prompt * n + sample) for sample in range(n)])
            for prompt in range(num_prompts)
        ]

    def sink(self, prompt_index: int) -> PromptEvents | None:
        """Takes the events of a prompt; None when the core cannot render them."""
        return self._prompts[prompt_index] if self._chunks.is_core_rendered else None

    def begin(self, prompt_index: int, prompt_token_ids: list[int]) -> None:
        """The engine has taken a prompt."""
        self._prompts[prompt_index].open_with(lambda: self._opening(prompt_index, prompt_token_ids))

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """What the writer's sinks do not bring, up to the end of the stream."""
        self._generation = generation
        chunks, n = self._chunks, self._n
        unfinished = set(range(len(self._prompts) * n))
        async for prompt_index, output in generation:
            self._usage.add(prompt_index, output)
            if chunks.timings is not None:
                chunks.timings.add(prompt_index, output)
            events = [chunks.progress(prompt_index * n, output)]
            if output.outputs:
                self._look_at(prompt_index, output)
                events.append(self._prompts[prompt_index].opening())
            for completion in output.outputs:
                index = prompt_index * n + completion.index
                if completion.finish_reason is not None:
                    unfinished.discard(index)
                    events.append(
                        chunks.finish(
                            index, completion.text, completion.finish_reason, completion.stop_reason, completion
                        )
                    )
                elif chunks.wants_chunk(completion):
                    events.append(chunks.text(index, completion.text, completion))
            if joined := b"".join(events):
                yield joined
        for index in sorted(unfinished):  # the engine let go of it without a word: it was aborted
            yield chunks.finish(index, "", "abort", None)
        if last := chunks.final_usage():
            yield last

    def _resume(self) -> None:
        if self._generation is not None:
            self._generation.resume()
