"""The chunks of a stream: the constant part is rendered once, then per event only what changed.

Most events are made by the core from :meth:`ChunkRenderer.template` and never come here. Rendered in Python are the
opening, each choice's end, and streams whose chunks hold more than text.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, overload

from rustvllm.outputs import CompletionOutput, PromptIds, RequestOutput
from rustvllm.server.answers.large_answers import FEW_PARTS, TURN_SECONDS, is_large
from rustvllm.server.answers.logprobs import LogprobsRenderer
from rustvllm.server.answers.timings import Timings, prompt_progress
from rustvllm.server.answers.usage import UsageCounter
from rustvllm.server.errors import error_event
from rustvllm.server.schemas.protocol import GenerationRequest
from rustvllm.server.stream.event_writer import EventWriter
from rustvllm.server.stream.generation import Generation
from rustvllm.server.stream.sse import DONE, event, json_bytes, json_string
from rustvllm.text.turn_formats import CoreResponseEvents, CoreTurnReading

_MOST_OPENED_AT_ONCE = 1024
"""Choices whose opening goes out with the first event of the core, on the spot: a millisecond or two of work."""


class ChunkRenderer:
    """Events of one completions or chat stream.

    Attributes:
        turn_reading: How the core reads the text that it makes chunks of; None: it is text alone.
        response_events: Makes the events in the core in place of a template; None: there is a template.

    Args:
        header: What every chunk starts with: id, object, created, model, system_fingerprint.
        text_key: Bytes between a choice's index and its text, for instance ``,"text":``.
        text_end: Bytes between the text and ``logprobs``.
        nulls: Members that are null where there is a text.
        request: For its stream options, and for what else its chunks are to hold.
        usage: The counter that the caller feeds.
        logprobs: How to show log-probabilities; None: not at all.
        force_usage: Send the final usage whether or not it was asked for.
    """

    turn_reading: CoreTurnReading | None = None
    response_events: CoreResponseEvents | None = None
    end: ClassVar[bytes] = DONE
    """What the stream ends with, behind its last event."""

    def __init__(
        self,
        header: dict[str, Any],
        text_key: bytes,
        text_end: bytes,
        nulls: bytes,
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
        self._says_more = logprobs is not None or self._shows_token_ids
        self._shows_progress = bool(request.return_progress)
        self._times_each = bool(request.timings_per_token)
        self.timings = Timings(request.n or 1) if request.timings or self._times_each else None
        self.include_usage = force_usage or bool(options and options.include_usage)
        self.continuous_usage = self.include_usage and bool(options and options.continuous_usage_stats)
        self._start = b"data: " + json_bytes(header)[:-1] + b',"choices":[{"index":'
        self._text_key = text_key
        self._text_end = text_end
        self._no_ids = nulls + b',"token_ids":null'
        self._before_ids = nulls + b',"token_ids":'
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
        return bool(completion.text) or self.continuous_usage or (self._says_more and bool(completion.token_ids))

    def template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in a chunk of choice ``index`` that has no usage of its own."""
        before = b"".join((self._start, b"%d" % index, self._text_key))
        after = b',"logprobs":null,"finish_reason":null,"stop_reason":null%b}]' % self._no_ids
        return before, b"".join((self._text_end, after, self._end))

    def before_text(self) -> bytes:
        """What has to stand before the first event of the core that holds text."""
        return b""

    def note_calls(self, index: int, num_calls: int) -> None:
        """The core has read a choice to its end, and found calls of tools in it."""

    def text(self, index: int, text: str, completion: CompletionOutput) -> bytes:
        """A chunk that adds ``text`` to choice ``index``, with the log-probabilities and ids of ``completion``."""
        top = self._timed() if self._times_each else b""
        rest = self._rest(self._text(text), self._shown_logprobs(completion), extra=self._ids(completion), top=top)
        return b"".join((self._start, b"%d" % index, rest))

    def echo(
        self,
        indices: Iterable[int],
        text: str,
        logprobs: dict[str, Any] | None,
        prompt_token_ids: list[int] | None = None,
    ) -> bytes:
        """Chunks with the prompt and its log-probabilities, before anything else of these choices.

        ``prompt_token_ids``, when they were asked for, are the choices' own.
        """
        extra = b',"prompt_token_ids":%b,"token_ids":null' % json_bytes(prompt_token_ids)
        return self._repeated(indices, self._rest(self._text(text), json_bytes(logprobs), extra=extra))

    def finish(
        self,
        index: int,
        text: str,
        finish_reason: str,
        stop_reason: int | str | None,
        completion: CompletionOutput | None = None,
    ) -> bytes:
        """The last chunk of choice ``index``, with its last text."""
        return self._end_of(index, self._text(text), finish_reason, stop_reason, completion)

    def _end_of(
        self,
        index: int,
        fields: bytes,
        finish_reason: str,
        stop_reason: int | str | None,
        completion: CompletionOutput | None,
    ) -> bytes:
        rest = self._rest(
            fields,
            self._shown_logprobs(completion),
            json_string(finish_reason),
            json_bytes(stop_reason),
            extra=self._ids(completion),
            top=self._timed(),
        )
        return b"".join((self._start, b"%d" % index, rest))

    def raw(self, indices: Iterable[int], fields: bytes, prompt_token_ids: list[int] | None = None) -> bytes:
        """Chunks of unfinished choices with ``fields`` (JSON members with their leading comma) in place of text.

        ``prompt_token_ids``, when they were asked for, are the chunks'.
        """
        top = b',"prompt_token_ids":%b,"prompt_text":null' % json_bytes(prompt_token_ids)
        return self._repeated(indices, self._rest(fields, b"null", top=top))

    def said(self, indices: Iterable[int], text: str) -> bytes:
        """Chunks of unfinished choices with text that was there before anything was generated."""
        return self._repeated(indices, self._rest(self._text(text), b"null"))

    def progress(self, index: int, output: RequestOutput) -> bytes:
        """A chunk that says how far a prompt is; empty when that was not asked for, or has not changed."""
        shown = prompt_progress(output) if self._shows_progress else None
        if shown is None:
            return b""
        top = b',"prompt_progress":' + json_bytes(shown)
        rest = self._rest(self._nothing, b"null", extra=self._no_ids, top=top)
        return b"".join((self._start, b"%d" % index, rest))

    def error(self, exc: BaseException) -> bytes:
        """The event of an error that ends the stream."""
        return error_event(exc, "")

    def large_opening(self) -> Iterable[bytes]:
        """What of the opening is too large to go out with it; a few milliseconds' work each."""
        return ()

    def closing(self) -> Iterable[bytes]:
        """What stands at the end of the stream, behind the ends of all choices; a few milliseconds' work each."""
        return (self.final_usage(),)

    def final_usage(self) -> bytes:
        """The extra chunk without choices; empty when it was not asked for."""
        if not self.include_usage:
            return b""
        return event({**self._header, "choices": [], "usage": self._usage.as_dict()})

    def _repeated(self, indices: Iterable[int], rest: bytes) -> bytes:
        """The same chunk for each of several choices."""
        start = self._start
        return b"".join([b"%b%d%b" % (start, index, rest) for index in indices])

    def _rest(
        self,
        fields: bytes,
        logprobs: bytes,
        finish_reason: bytes = b"null",
        stop_reason: bytes = b"null",
        *,
        extra: bytes = b"",
        top: bytes = b"",
    ) -> bytes:
        """What follows the index in an event; ``extra`` ends the choice, ``top`` stands behind the choices."""
        choice = b'%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}]%b' % (
            fields,
            logprobs,
            finish_reason,
            stop_reason,
            extra,
            top,
        )
        end = b',"usage":' + json_bytes(self._usage.as_dict()) + b"}\n\n" if self.continuous_usage else self._end
        return choice + end

    def _text(self, text: str) -> bytes:
        return b"".join((self._text_key, json_string(text), self._text_end))

    def _shown_logprobs(self, completion: CompletionOutput | None) -> bytes:
        if self._logprobs is None or completion is None or not completion.token_ids:
            return b"null"
        return json_bytes(self._logprobs(completion))

    def _ids(self, completion: CompletionOutput | None) -> bytes:
        if not self._shows_token_ids:
            return self._no_ids
        return self._before_ids + json_bytes([] if completion is None else completion.token_ids)

    def _timed(self) -> bytes:
        return b"" if self.timings is None else b',"timings":' + json_bytes(self.timings.as_dict())


class ChoiceTemplates(Sequence[tuple[bytes, bytes]]):
    """The templates of one prompt's choices, each made when it is asked for: there may be thousands.

    Args:
        chunks: Renders them.
        first: Index of the first choice.
        n: How many there are.
    """

    def __init__(self, chunks: ChunkRenderer, first: int, n: int) -> None:
        self._chunks = chunks
        self._indices = range(first, first + n)

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, sample: int) -> tuple[bytes, bytes]: ...

    @overload
    def __getitem__(self, sample: slice) -> list[tuple[bytes, bytes]]: ...

    def __getitem__(self, sample: int | slice) -> tuple[bytes, bytes] | list[tuple[bytes, bytes]]:
        if isinstance(sample, slice):
            return [self._chunks.template(index) for index in self._indices[sample]]
        return self._chunks.template(self._indices[sample])


class PromptEvents:
    """The events of one prompt's choices on their way to the client; the first of them takes the opening along.

    The opening goes out with the first output and not before it: clients take the first event's time for the time to
    first token.

    Args:
        writer: Where they go.
        chunks: Renders what the core does not.
        first: Index of the first choice.
        n: How many there are.

    Attributes:
        templates: Of each choice; see :class:`~rustvllm.engine.request.state.EventSink`.
        turn_reading: See there.
        response_events: See there.
    """

    def __init__(self, writer: EventWriter, chunks: ChunkRenderer, first: int, n: int) -> None:
        self.templates: Sequence[tuple[bytes, bytes]] = ChoiceTemplates(chunks, first, n)
        self.turn_reading = chunks.turn_reading
        self.response_events = chunks.response_events
        self._chunks = chunks
        self._first = first
        self._writer = writer
        self._open: Callable[[], bytes] | None = None
        self._has_text = False

    def open_with(self, opening: Callable[[], bytes]) -> None:
        """Chunks that the choices begin with; made when they are needed."""
        self._open = opening

    def write(self, event: bytes) -> bool:
        """Send an event, which may be empty: what opens the choices goes with it; whether more can be taken now."""
        if event and not self._has_text:
            self._has_text = True
            event = self._chunks.before_text() + event
        if self._open is not None:
            event = self.opening() + event
        return self._writer.write(event) if event else True

    def note_calls(self, sample: int, num_calls: int) -> None:
        """A choice that the core has read has ended with calls of tools."""
        self._chunks.note_calls(self._first + sample, num_calls)

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
        opening: Callable[[int, PromptIds], bytes],
        look_at: Callable[[int, RequestOutput], None],
    ) -> None:
        self._chunks = chunks
        self._usage = usage
        self._n = n
        self._opening = opening
        self._look_at = look_at
        self.writer = EventWriter(self._go_on)
        self._generation: Generation | None = None
        self._is_core_rendered = chunks.is_core_rendered and n <= _MOST_OPENED_AT_ONCE
        self._prompts = [PromptEvents(self.writer, chunks, prompt * n, n) for prompt in range(num_prompts)]

    def sink(self, prompt_index: int) -> PromptEvents | None:
        """Takes the events of a prompt; None when the core cannot render them, or the opening would take long."""
        return self._prompts[prompt_index] if self._is_core_rendered else None

    def begin(self, prompt_index: int, prompt_ids: PromptIds) -> None:
        """The engine has taken a prompt."""
        self._prompts[prompt_index].open_with(lambda: self._opening(prompt_index, prompt_ids))

    def follow(self, generation: Generation) -> None:
        """Resume a generation when the client reads; to be called before the writer is attached.

        Prompts may have text before that, while others are handed in: they are held back until they are resumed.
        """
        self._generation = generation

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """What the writer's sinks do not bring, up to the end of the stream."""
        chunks, n = self._chunks, self._n
        unfinished = set(range(len(self._prompts) * n))
        async for prompt_index, output in generation:
            self._usage.add(prompt_index, output)
            if chunks.timings is not None:
                chunks.timings.add(prompt_index, output)
            events = [chunks.progress(prompt_index * n, output)]
            if output.outputs:
                is_long = not self._is_core_rendered and (n > FEW_PARTS or is_large([output], ()))
                opening = partial(self._open, prompt_index, output)
                events.append(await asyncio.to_thread(opening) if is_long else opening())
                for piece in chunks.large_opening():
                    yield piece
                    await asyncio.sleep(0)
            began = 0.0 if len(output.outputs) > FEW_PARTS else time.monotonic()
            for completion in output.outputs:
                if time.monotonic() - began > TURN_SECONDS:
                    yield b"".join(events)
                    events.clear()
                    await asyncio.sleep(0)
                    began = time.monotonic()
                index = prompt_index * n + completion.index
                if completion.finish_reason is not None:
                    unfinished.discard(index)
                is_long = not self._is_core_rendered and is_large((), [completion])
                news = partial(self._news, index, completion)
                events.append(await asyncio.to_thread(news) if is_long else news())
            if joined := b"".join(events):
                yield joined
        for index in sorted(unfinished):  # the engine let go of it without a word: it was aborted
            yield chunks.finish(index, "", "abort", None)
        for last in chunks.closing():
            if last:
                yield last
                await asyncio.sleep(0)

    @property
    def end(self) -> bytes:
        """What the stream ends with, behind its last event."""
        return self._chunks.end

    def error(self, exc: BaseException) -> bytes:
        """The event of an error that ends the stream."""
        return self._chunks.error(exc)

    def _open(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Look at an output, and make what has to go before its news."""
        self._look_at(prompt_index, output)
        return self._prompts[prompt_index].opening()

    def _news(self, index: int, completion: CompletionOutput) -> bytes:
        """What is new of a choice, as its chunk."""
        if completion.finish_reason is not None:
            return self._chunks.finish(
                index, completion.text, completion.finish_reason, completion.stop_reason, completion
            )
        return self._chunks.text(index, completion.text, completion) if self._chunks.wants_chunk(completion) else b""

    def _go_on(self) -> None:
        """The client reads again, or never will."""
        if self._generation is None:
            return
        if self.writer.failure is None:
            self._generation.resume()
        else:
            self._generation.close()
