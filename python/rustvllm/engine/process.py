"""The engine process: ``python -m rustvllm.engine.process``, started by :class:`ProcessClient` and by nobody else.

It reads its configuration as JSON from standard input, loads the model, says so on a pipe, and steps until it is told
to stop, its parent is gone, or it breaks. Requests come and tokens leave through ``_core.EngineServer``'s own thread,
which never takes the interpreter; this thread does nothing but schedule, execute, update.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rustvllm import _core
from rustvllm.engine import run_loop
from rustvllm.engine.config_json import load_config
from rustvllm.engine.core import EngineCore
from rustvllm.exceptions import RustVLLMError
from rustvllm.logger import init_logger

logger = init_logger(__name__)

EXIT_OK, EXIT_FAILURE = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine.

    Returns:
        The exit code: 0 when it was told to stop or its parent is gone, 1 when it broke or could not start.
    """
    parser = argparse.ArgumentParser(prog="python -m rustvllm.engine.process", description=__doc__)
    parser.add_argument("--socket", required=True, help="path of the socket to listen on")
    parser.add_argument("--alive-fd", type=int, required=True, help="pipe that ends with the parent")
    parser.add_argument(
        "--status-fd", type=int, required=True, help="pipe to say on that the engine is ready, or why not"
    )
    args = parser.parse_args(argv)
    stop = _Stop()
    # The parent decides about Ctrl-C: it lets open requests end first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    watch = (args.alive_fd, Path(args.socket).parent)
    threading.Thread(target=_die_with_parent, args=watch, name="rustvllm-parent", daemon=True).start()
    with os.fdopen(args.status_fd, "w", encoding="utf-8") as status:
        try:
            began = time.perf_counter()
            core = EngineCore(load_config(sys.stdin.read()))
            server = _core.EngineServer(core.handle, args.socket)
        except BaseException as error:
            _say(status, error={"type": type(error).__name__, "message": str(error)})
            if not isinstance(error, RustVLLMError):
                logger.critical("the engine could not start", exc_info=error)
            return EXIT_FAILURE
        stop.handle = core.handle
        run_loop.freeze_heap()
        _say(status, ready={"num_blocks": core.num_blocks, "seconds": round(time.perf_counter() - began, 3)})
    return _run(core, server, stop)


class _Stop:
    """Whether the engine is to end; setting it wakes the engine."""

    def __init__(self) -> None:
        self.is_set = False
        self.handle: _core.EngineHandle | None = None

    def set(self) -> None:
        self.is_set = True
        if self.handle is not None:
            self.handle.wake()


def _run(core: EngineCore, server: "_core.EngineServer", stop: _Stop) -> int:
    death = run_loop.run(core, lambda: stop.is_set)
    if death is not None:
        server.fail(str(death).removeprefix("the engine died: "))  # its clients say that
        return EXIT_FAILURE
    server.stop()
    return EXIT_OK


def _say(status: Any, **what: Any) -> None:
    try:
        status.write(json.dumps(what) + "\n")
        status.flush()
    except BrokenPipeError:
        logger.debug("nobody waits for this engine any more")


def _die_with_parent(alive_fd: int, directory: Path) -> None:
    """End the process and remove its directory when the other end of a pipe that only the parent has is closed."""
    while os.read(alive_fd, 1):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(EXIT_OK)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking torch apart piece by piece takes seconds, and nothing is left to be done.
    os._exit(code)
