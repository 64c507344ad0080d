"""The other end of ``decode_worker``: a process that decodes images for one thread, started again when it has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from typing import TYPE_CHECKING, BinaryIO, Final

from rustvllm.config.vision import VisionConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.images.decode_worker import CPU_SECONDS, LENGTH_BYTES, MEMORY_BYTES, receive
from rustvllm.images.tiles import ImageTiles
from rustvllm.process.restricted_child import end_restricted, start_restricted

if TYPE_CHECKING:
    import socket
    import subprocess

WALL_SECONDS: Final = 60.0
"""Time limit of an image on a busy machine."""
_PIECE_CHARS: Final = 1 << 18


class DecodeProcess:
    """Decodes one image after the other; not for several threads at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., DecodeProcess] | None = None
        self._channel: socket.socket | None = None
        self._answers: BinaryIO | None = None

    def tiles_of(self, url: str, where: str, vision: VisionConfig) -> ImageTiles:
        """The tiles of an image in a ``data:`` URL; blocks, without the interpreter.

        Args:
            url: As the client sent it.
            where: Names it in messages.
            vision: How the model sees images.

        Raises:
            InvalidRequestError: The image is wrong, or takes too long or too much memory.
            OSError: No process can be started.
        """
        if not url.isascii():
            raise InvalidRequestError(f"{where} is not valid base64: it holds other characters than ASCII", "image_url")
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._answers is not None
        head = json.dumps({"where": where, "vision": dataclasses.asdict(vision)}).encode()
        try:
            self._send(head, url)
            facts, content = json.loads(receive(self._answers) or b"null"), receive(self._answers)
        except OSError:  # it has ended, or takes too long
            facts, content = None, b""
        if facts is None:
            self.close()
            raise InvalidRequestError(
                f"{where} cannot be decoded within {CPU_SECONDS} seconds of processor time and {MEMORY_BYTES >> 30} "
                "GiB of memory: send a smaller image",
                "image_url",
            )
        if "message" in facts:
            raise InvalidRequestError(facts["message"], facts["param"])
        return ImageTiles(content, bytes.fromhex(facts["digest"]), facts["rows"], facts["columns"])

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

    def _send(self, head: bytes, url: str) -> None:
        assert self._channel is not None
        self._channel.sendall(len(head).to_bytes(LENGTH_BYTES, "big") + head + len(url).to_bytes(LENGTH_BYTES, "big"))
        for at in range(0, len(url), _PIECE_CHARS):  # in pieces, because other threads wait while one is encoded
            self._channel.sendall(url[at : at + _PIECE_CHARS].encode("ascii"))


def _end(process: subprocess.Popen[bytes], channel: socket.socket, answers: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        answers.close()
    end_restricted(process, channel)
