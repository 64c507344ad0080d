"""The process that decodes images which clients sent: ``python -m rustvllm.images.decode_worker``.

Decoders are C code that reads foreign files, and some hold the interpreter for as long as they take. So they run in a
process with limited memory and processor time, which cannot write to files and has almost no environment.

Orders and answers pass through the socket that is the process's standard input. An order is a JSON object and a
``data:`` URL, an answer a JSON object and the pixels; each of these has its length before it, in four bytes.
"""

import json
import os
import signal
import socket
from typing import Any, BinaryIO, Final

from rustvllm.config.vision import VisionConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.images.decoding import decode_image, read_data_url
from rustvllm.images.tiles import make_tiles
from rustvllm.process.own_limits import limit_this_process

CPU_SECONDS: Final = 10
"""Processor time that one image may take."""
MEMORY_BYTES: Final = 2 << 30
"""Address space in addition to what the interpreter has when it starts to serve."""
LENGTH_BYTES: Final = 4


def main() -> None:
    """Serve orders until the other end closes the socket."""
    channel = socket.socket(fileno=os.dup(0))
    limit_this_process(MEMORY_BYTES)
    with channel.makefile("rb") as orders:
        while (head := receive(orders)) is not None and (url := receive(orders)) is not None:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF has no handler here, so it ends the process
            facts, content = _answer(json.loads(head), url.decode("ascii"))
            signal.setitimer(signal.ITIMER_PROF, 0)
            for part in (json.dumps(facts).encode(), content):
                channel.sendall(len(part).to_bytes(LENGTH_BYTES, "big"))
                channel.sendall(part)


def receive(stream: BinaryIO) -> bytes | None:
    """A part of an order or an answer; None if the other end has closed the socket before all of it was there."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    part = stream.read(size := int.from_bytes(head, "big"))
    return part if len(part) == size else None


def _answer(order: dict[str, Any], url: str) -> tuple[dict[str, Any], bytes]:
    where = order["where"]
    vision = VisionConfig(**order["vision"])
    try:
        tiles = make_tiles(decode_image(read_data_url(url, where), where, vision), vision)
    except InvalidRequestError as error:
        return {"message": str(error), "param": error.param}, b""
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- an error of one image must not look like a limit
        message = f"{where} cannot be made into tiles: {type(error).__name__}: {error!s:.200}"
        return {"message": message, "param": "image_url"}, b""
    return {"rows": tiles.rows, "columns": tiles.columns, "digest": tiles.digest.hex()}, tiles.content


if __name__ == "__main__":
    try:
        main()
    except (OSError, MemoryError):  # the parent has ended, or there is no memory left
        os._exit(1)
    os._exit(0)
