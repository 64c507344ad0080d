"""The other end of ``decode_worker``: a process that decodes images for one thread, started again when it has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import weakref
from typing import BinaryIO, Final

from rustvllm.config.vision import VisionConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.images.decode_worker import CPU_SECONDS, LENGTH_BYTES, MEMORY_BYTES, receive
from rustvllm.images.tiles import ImageTiles
from rustvllm.process.restricted_child import end_restricted, start_restricted

WALL_SECONDS: Final = 60.0
"""Time limit of an image on a busy machine."""
_ATTEMPTS: Final = 2
"""An image is given up after so many processes have ended over it without having exceeded a limit."""
_END_SECONDS: Final = 5.0
"""How long a process may take to end after it has closed its socket."""
_PIECE_CHARS: Final = 1 << 18


class DecodeProcess:
    """Decodes one image after the other; not for several threads at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., DecodeProcess] | None = None
        self._channel: socket.socket | None = None
        self._answers: BinaryIO | None = None

    def tiles_of(self, url: str, where: str, vision: VisionConfig, before: str = "") -> ImageTiles:
        """The tiles of an image in a ``data:`` URL; blocks, without the interpreter.

        Args:
            url: As the client sent it.
            where: Names it in messages.
            vision: How the model sees images.
            before: The beginning of the URL, in ASCII, if ``url`` is the rest of it.

        Raises:
            InvalidRequestError: The image is wrong, or takes too long or too much memory.
            OSError: No process can be started.
        """
        if not url.isascii():
            raise InvalidRequestError(f"{where} is not valid base64: it holds other characters than ASCII", "image_url")
        head = json.dumps({"where": where, "vision": dataclasses.asdict(vision)}).encode()
        how = ""
        for _ in range(_ATTEMPTS):
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                return self._ask(head, before, url)
            except InvalidRequestError:
                raise
            except TimeoutError:
                self.close()
                break
            except (EOFError, OSError):  # it has ended
                how = self._how_it_was_ended()
            except BaseException:  # what it still says of this image must not be taken for its word on the next
                self.close()
                raise
            if not how:
                break
        limits = f"within {CPU_SECONDS} seconds of processor time and {MEMORY_BYTES >> 30} GiB of memory"
        raise InvalidRequestError(
            f"{where} cannot be decoded: the process that decodes it was ended by {how}: try again, or send a smaller "
            "image"
            if how
            else f"{where} cannot be decoded {limits}: send a smaller image",
            "image_url",
        )

    def close(self) -> None:
        """End the process, if there is one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _start(self) -> None:
        self.close()
        self._process, self._channel = start_restricted("rustvllm.images.decode_worker", WALL_SECONDS)
        self._answers = self._channel.makefile("rb")
        self._end = weakref.finalize(self, _end, self._process, self._channel, self._answers)

    def _ask(self, head: bytes, before: str, url: str) -> ImageTiles:
        """Send an image and read what became of it.

        Raises:
            InvalidRequestError: The image is wrong.
            EOFError: The process has ended.
            OSError: Likewise; a ``TimeoutError`` if it takes too long.
        """
        assert self._channel is not None
        assert self._answers is not None
        size = (len(before) + len(url)).to_bytes(LENGTH_BYTES, "big")
        self._channel.sendall(len(head).to_bytes(LENGTH_BYTES, "big") + head + size + before.encode("ascii"))
        for at in range(0, len(url), _PIECE_CHARS):  # in pieces, because other threads wait while one is encoded
            self._channel.sendall(url[at : at + _PIECE_CHARS].encode("ascii"))
        facts, content = receive(self._answers), receive(self._answers)
        if facts is None or content is None:
            raise EOFError
        said = json.loads(facts)
        if "message" in said:
            raise InvalidRequestError(said["message"], said["param"])
        return ImageTiles(content, bytes.fromhex(said["digest"]), said["rows"], said["columns"])

    def _how_it_was_ended(self) -> str:
        """The signal that ended the process; empty: a limit did."""
        assert self._process is not None
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        if code >= 0 or -code == signal.SIGPROF:
            return ""  # too little memory, too much processor time, or too long in all
        return signal.Signals(-code).name


def _end(process: subprocess.Popen[bytes], channel: socket.socket, answers: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        answers.close()
    end_restricted(process, channel)
