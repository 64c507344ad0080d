""":class:`ChatRenderer`: renders a chat template in child processes, which stay for the next conversation.

A template that comes with a model is not trusted more than one in a request. Both have the same limits and run in a
process of their own (:mod:`rustvllm.text.template_worker`). A template that exceeds a limit gives an error and delays
no other request. The plain template is part of this program and is rendered in this process.
"""

import asyncio
import contextlib
import json
import signal
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rustvllm.exceptions import InvalidRequestError
from rustvllm.process.restricted_child import end_restricted, start_restricted
from rustvllm.text.chat_template import PLAIN_CHAT_TEMPLATE, render_chat
from rustvllm.text.template_worker import CPU_SECONDS, FACTS, LENGTH_BYTES, MAX_TEXT_CHARS, MEMORY_BYTES, TEXT

LONG_ORDER_BYTES = 32 << 10
"""Longer orders go to a second process, so that short ones do not wait for them."""
ONCE_AT_A_TIME = 2
"""Number of templates from requests that are rendered at the same time."""
_ATTEMPTS = 2
"""An order fails after this many processes have ended while they were serving it."""
_MOST_ENDS = 8
"""An order fails after this many processes have ended in all: other orders can end them, too."""
WALL_SECONDS = 20.0
"""Time limit of an order on a busy machine. An endless loop ends earlier, by the limit on processor time."""
_NO_END = "it did not finish"
_MAX_ANSWER_BYTES = 1 + 4 * MAX_TEXT_CHARS  # a character has four bytes at most

_slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


class ChatRenderer:
    """Renders one template, for one event loop or for callers that block.

    Attributes:
        template: Source of the template.
        walks_through_parts: Whether the template expects the content of a message as a list of parts.
    """

    def __init__(self, template: str, tokens: Mapping[str, Any], owner: str) -> None:
        """Start a process and compile the template there; blocks until that is done.

        Args:
            template: Source of the template.
            tokens: The special tokens that the template may use, by name.
            owner: What errors name as the template's origin.

        Raises:
            InvalidRequestError: The template is not valid, or exceeds the limits.
            OSError: No process can be started to render it.
        """
        self.template = template
        self._tokens = dict(tokens)
        self._is_plain = template == PLAIN_CHAT_TEMPLATE
        self._short, self._long = _Lane(template), _Lane(template)
        self.walks_through_parts = False
        if not self._is_plain:
            try:
                self.walks_through_parts = self._short.start()
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{owner}: {error}", error.param) from None

    def prepare(self, messages: Any, options: Mapping[str, Any]) -> str | bytes:
        """Prepare a conversation for :meth:`render`. A long one takes long, so call this off the event loop.

        Args:
            messages: See :func:`~rustvllm.text.chat_template.render_chat`.
            options: The other arguments of that function.

        Returns:
            The order for the process that renders; for the plain template, the prompt text.

        Raises:
            InvalidRequestError: See that function; only for the plain template.
        """
        if self._is_plain:
            return render_chat(_Tokens(self._tokens), messages, chat_template=self.template, **options)
        return render_order(self._tokens, messages, options)

    async def render(self, prepared: str | bytes) -> str:
        """Render what :meth:`prepare` returned; returns the prompt text.

        Raises:
            InvalidRequestError: See :func:`~rustvllm.text.chat_template.render_chat`; or a limit was exceeded.
            OSError: No process can be started, or the processes end before they answer.
        """
        if isinstance(prepared, str):
            return prepared
        return read_text(await self._lane(prepared).ask(prepared))

    def render_blocking(self, prepared: str | bytes) -> str:
        """Render like :meth:`render`, but block instead of using the event loop."""
        if isinstance(prepared, str):
            return prepared
        return read_text(self._lane(prepared).ask_blocking(prepared))

    def close(self) -> None:
        """End the child processes."""
        self._short.close()
        self._long.close()

    def _lane(self, order: bytes) -> "_Lane":
        return self._long if len(order) > LONG_ORDER_BYTES else self._short


class _Lane:
    """A process that is started when it is needed, and started again if it has ended."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._process: TemplateProcess | None = None
        self._link: TemplateLink | None = None
        self._starting: asyncio.Task[TemplateLink] | None = None

    def start(self) -> bool:
        """Start the process; blocks. Returns whether the template walks through parts."""
        process = TemplateProcess()
        try:
            answer = read_probe(process.ask(probe_order(self._template)))
        except BaseException:
            process.close()
            raise
        self._process = process
        return answer

    async def ask(self, order: bytes) -> bytes:
        """Send an order and return the answer. If the process ends without exceeding a limit, try another one.

        Raises:
            InvalidRequestError: The order exceeded its time.
            OSError: Too many processes ended.
        """
        attempts = 0
        for _ in range(_MOST_ENDS):
            link = self._link
            try:
                if link is None or not link.is_open:
                    if self._starting is None:
                        self._starting = asyncio.ensure_future(self._connect())
                    link = await asyncio.shield(self._starting)
                return await link.ask(order)
            except ProcessEndedError as error:
                attempts += error.was_served
                if attempts == _ATTEMPTS:
                    break
        raise OSError("the processes for chat templates end before they answer")

    async def _connect(self) -> "TemplateLink":
        try:
            if self._process is None or not self._process.is_alive:
                await asyncio.to_thread(self.start)
            assert self._process is not None
            self._link = await self._process.connect()
            return self._link
        finally:
            self._starting = None

    def ask_blocking(self, order: bytes) -> bytes:
        """Send an order and return the answer, like :meth:`ask`, but block instead of using the event loop."""
        for _ in range(_ATTEMPTS):
            if self._process is None or not self._process.is_alive:
                self.start()
            assert self._process is not None
            try:
                return self._process.ask(order)
            except ProcessEndedError:
                continue
        raise OSError("the processes for chat templates end before they answer")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.close()


async def render_once(
    template: str, tokens: Mapping[str, Any], build: Callable[[bool], Any], options: Mapping[str, Any]
) -> str:
    """Render a template that came with a request, in a process for this request alone.

    Args:
        template: Source of the template.
        tokens: The special tokens that the template may use, by name.
        build: Makes the messages; its argument is whether the template walks through their parts.
        options: See :meth:`ChatRenderer.prepare`.

    Returns:
        The prompt text.

    Raises:
        InvalidRequestError: The template is not valid, refuses the messages, fails on them, or exceeds a limit.
        OSError: No process can be started, or it ends before it answers.
    """
    loop = asyncio.get_running_loop()
    for other in [each for each in _slots if each.is_closed()]:
        del _slots[other]

    def prepare(in_parts: bool) -> bytes:
        return render_order(tokens, build(in_parts), options)

    async with _slots.setdefault(loop, asyncio.Semaphore(ONCE_AT_A_TIME)):
        process = await asyncio.to_thread(TemplateProcess)
        try:
            link = await process.connect()
            in_parts = read_probe(await link.ask(probe_order(template)))
            return read_text(await link.ask(await asyncio.to_thread(prepare, in_parts)))
        except ProcessEndedError as error:
            raise OSError(str(error)) from None
        finally:
            await asyncio.to_thread(process.close)


class _Tokens:
    """Stands in for the tokenizer: a template sees only its special tokens."""

    def __init__(self, tokens: Mapping[str, Any]) -> None:
        self.special_tokens_map = tokens


class ProcessEndedError(Exception):
    """The process has ended, but not because of a time limit.

    Attributes:
        was_served: Whether the process was serving this order, which may then be the cause.
    """

    def __init__(self, *, was_served: bool) -> None:
        super().__init__("the process that renders chat templates has ended")
        self.was_served = was_served


class TemplateProcess:
    """One process that serves one order after the other. It ends when this object is collected."""

    def __init__(self) -> None:
        """Start the process. It accepts orders at once and answers when its imports are done.

        Raises:
            OSError: The process cannot be started.
        """
        self._process, self._channel = start_restricted("rustvllm.text.template_worker", WALL_SECONDS)
        self._end = weakref.finalize(self, end_restricted, self._process, self._channel)

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs and accepts orders."""
        return bool(self._end.alive) and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self._process.pid)

    def close(self) -> None:
        """Kill the process. Idempotent; may wait a few milliseconds until its memory is released."""
        self._end()

    def ask(self, order: bytes) -> bytes:
        """Send an order and return the answer; blocks. If there is no answer, kill the process.

        Raises:
            InvalidRequestError: The order took too long.
            ProcessEndedError: The process has ended.
        """
        try:
            self._channel.sendall(framed(order))
            with self._channel.makefile("rb") as answers:
                size = int.from_bytes(_read_all(answers.read(LENGTH_BYTES), LENGTH_BYTES), "big")
                return _read_all(answers.read(size), size)
        except OSError as error:
            raise self.end_because(timed_out=isinstance(error, TimeoutError), was_served=True) from None

    async def connect(self) -> "TemplateLink":
        """Hand the process over to the running event loop; from then on, use only the returned link."""
        _, link = await asyncio.get_running_loop().create_connection(
            lambda: TemplateLink(self), sock=self._channel.dup()
        )
        return link

    def read_rest(self) -> bytes:
        """Read what the process sent before it ended and what is still unread; does not wait."""
        read = bytearray()
        with contextlib.suppress(OSError):  # nothing more, or the socket is closed
            self._channel.setblocking(False)
            while part := self._channel.recv(1 << 16):
                read += part
        return bytes(read)

    def end_because(self, *, timed_out: bool, was_served: bool) -> InvalidRequestError | ProcessEndedError:
        """Kill the process and return the error for an order that it has not answered.

        Args:
            timed_out: Whether the order took longer than ``WALL_SECONDS``.
            was_served: Whether the process was serving this order.
        """
        self.close()
        if was_served and (timed_out or self._process.returncode == -signal.SIGPROF):
            return _too_much(_NO_END)
        return ProcessEndedError(was_served=was_served)


class TemplateLink(asyncio.Protocol):
    """Sends orders to a process; its answers arrive in the same order."""

    def __init__(self, process: TemplateProcess) -> None:
        self._process = process
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._timed_out = False
        self._has_stopped = False  # the process has announced that it serves no further order
        self.is_open = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop. The signature differs because uvloop's transports do not subclass asyncio's."""
        self._transport = transport
        self.is_open = True

    async def ask(self, order: bytes) -> bytes:
        """Send an order and return the answer.

        Raises:
            InvalidRequestError: The order took too long.
            ProcessEndedError: The process has ended.
        """
        if not self.is_open:
            raise ProcessEndedError(was_served=False)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        self._waiting.append(answer)
        if self._timer is None:
            self._timer = loop.call_later(WALL_SECONDS, self._give_up)
        self._transport.write(len(order).to_bytes(LENGTH_BYTES, "big"))
        self._transport.write(order)  # by itself: a copy of megabytes takes milliseconds
        return await answer

    def close(self) -> None:
        """Kill the process and close the connection to it."""
        self._process.close()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        received = self._received
        received += data
        while len(received) >= LENGTH_BYTES:
            size = int.from_bytes(received[:LENGTH_BYTES], "big")
            if size > _MAX_ANSWER_BYTES:
                self._give_up()
                return
            end = LENGTH_BYTES + size
            if len(received) < end:
                return
            answer = bytes(received[LENGTH_BYTES:end])
            del received[:end]
            self._answered(answer)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 -- asyncio's
        """Called by the event loop when the process has ended, most likely because of the first waiting order."""
        self.is_open = False
        if not self._timed_out:
            # A failed send closes the transport, although answers may still be waiting to be read.
            self.data_received(self._process.read_rest())
        if self._timer is not None:
            self._timer.cancel()
        for index, answer in enumerate(self._waiting):
            was_served = index == 0 and not self._has_stopped
            reason = self._process.end_because(timed_out=self._timed_out, was_served=was_served)
            if not answer.done():
                answer.set_exception(reason)
        self._waiting.clear()
        self._process.close()

    def _answered(self, answer: bytes) -> None:
        if answer.startswith(FACTS) and json.loads(answer.removeprefix(FACTS)).get("ends"):
            self._has_stopped, self.is_open = True, False
        first = self._waiting.popleft()
        if not first.done():  # else its request was cancelled
            first.set_result(answer)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(WALL_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._timed_out = True
        self.is_open = False
        self.close()


def framed(order: bytes) -> bytes:
    """Prefix an order with its length."""
    return len(order).to_bytes(LENGTH_BYTES, "big") + order


def probe_order(template: str) -> bytes:
    """Make the order that sets the template for later orders and asks about its properties."""
    return json.dumps({"template": template, "probe": True}).encode()


def render_order(tokens: Mapping[str, Any], messages: Any, options: Mapping[str, Any]) -> bytes:
    """Make the order that renders special tokens, messages and other variables with the template."""
    order = {"tokens": tokens, "messages": messages, "options": options}
    return json.dumps(order, default=_as_json).encode()


def read_probe(answer: bytes) -> bool:
    """Read the answer to a probe: whether the template walks through the parts of messages.

    Raises:
        InvalidRequestError: The template is not valid, or exceeds the limits.
    """
    return bool(_read_facts(answer, "chat_template")["walks_through_parts"])


def read_text(answer: bytes) -> str:
    """Read the answer to an order to render: the prompt text.

    Raises:
        InvalidRequestError: See :func:`~rustvllm.text.chat_template.render_chat`; or a limit was exceeded.
    """
    if answer.startswith(TEXT):
        return answer[len(TEXT) :].decode(errors="surrogatepass")
    return str(_read_facts(answer, "messages")["text"])


def _read_facts(answer: bytes, param: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(answer.removeprefix(FACTS))
    if "limit" in facts:
        raise _too_much(facts["limit"], param)
    if "message" in facts:
        raise InvalidRequestError(facts["message"], facts["param"])
    return facts


def _read_all(received: bytes, size: int) -> bytes:
    if len(received) < size:
        raise ConnectionResetError
    return received


def _as_json(value: Any) -> Any:
    """Replace a value that JSON cannot hold: a mapping by a dict, another object by the name of its type."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


def _too_much(reason: str, param: str = "chat_template") -> InvalidRequestError:
    return InvalidRequestError(
        f"The chat template exceeded its limits: {reason} (a template has {CPU_SECONDS} seconds of processor time, "
        f"{MEMORY_BYTES >> 20} MiB of memory and {MAX_TEXT_CHARS >> 20} Mi characters of text). Use another template, "
        "or send fewer or shorter messages.",
        param,
    )
