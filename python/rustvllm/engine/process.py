"""The engine process: ``python -m rustvllm.engine.process``, started by :class:`ChildProcess` only.

It gets its configuration as JSON from standard input, loads the model, says so on a pipe, and steps until its parent
stops it or is gone, or it fails. Requests come and tokens leave through ``_core.EngineServer``'s own thread,
which never takes the interpreter; this thread does nothing but schedule, execute, update.
"""

import base64
import gc
import importlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rustvllm import _core
from rustvllm.config import EngineConfig
from rustvllm.engine import run_loop
from rustvllm.engine.core import EngineCore
from rustvllm.exceptions import ConfigError, RustVLLMError
from rustvllm.logger import init_logger
from rustvllm.observe.metrics.counters import EngineMetrics
from rustvllm.observe.metrics.stat_logger import LoggingStatLogger
from rustvllm.observe.metrics.stat_reporter import StatReporter
from rustvllm.observe.trace.sinks import make_tracer
from rustvllm.process.address import EngineAddress
from rustvllm.process.config_json import build, dump_info
from rustvllm.process.output import serving_output
from rustvllm.process.parent_link import ParentLink
from rustvllm.process.startup_memory import explain_shortage

logger = init_logger(__name__)

COMPLAINT_SECONDS = 1.0
"""Between two looks whether the transport has something for the log."""
EXIT_OK, EXIT_FAILURE = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine.

    Returns:
        The exit code: 0 after a shutdown, 1 when the engine failed or could not start.
    """
    gc.disable()  # until the start is over: imports make much and little garbage
    stop = _Stop()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    link = ParentLink.from_command_line("python -m rustvllm.engine.process", argv, "--executor")
    try:
        serving_output.begin()
        _import_executor(link.args.executor)  # while the parent finds out what there is to load
        phases = {"import": link.age}
        order = link.receive()
        ordered = link.age
        if (gpu := order.get("cuda_visible_devices")) is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        config = build(EngineConfig, order["config"])
        overlap = config.scheduler.async_scheduling
        tracer = make_tracer(config.tracing, order["name"], owns_file=False, has_overlap=overlap)
        core = EngineCore(config, tracer, has_clients=True, node_secret=_secret(order))
        server = _listen(core, order)
        core.on_step_error = server.note_step_error
        reporter = _make_reporter(core, order.get("rank", 0))
        if reporter is not None:
            reporter.start()
        threading.Thread(target=_log_complaints, args=(server,), name="rustvllm-complaints", daemon=True).start()
    except BaseException as error:
        link.say_error(error)
        if explain_shortage(error) is None and not isinstance(error, RustVLLMError):
            logger.critical("the engine could not start", exc_info=error)
        return EXIT_FAILURE
    stop.handle = core.handle
    # What exists now lives as long as the engine: the collector need not walk through it, not even once.
    gc.freeze()
    gc.enable()
    phases["wait for orders"] = ordered - phases["import"]
    phases |= core.startup_phases
    longest = core.config.model.max_model_len
    link.say_ready(link.age, phases, num_blocks=core.num_blocks, max_model_len=longest, tcp_port=server.tcp_port)
    died = run_loop.run(core, lambda: stop.is_set, server)
    if reporter is not None:
        reporter.stop()
    death = None if died is None else str(died)
    if tracer is not None:
        tracer.close()
    for complaint in server.take_complaints():
        logger.warning("%s", complaint)
    if death is None:
        server.stop()
        return EXIT_OK
    link.say(death=death)
    server.fail(death.removeprefix("the engine died: "))  # its clients say that
    return EXIT_FAILURE


def _log_complaints(server: "_core.EngineServer") -> None:
    """Have the log say what the transport complains of, while it serves; what goes on without end is said once."""
    before: set[str] = set()
    while True:
        complaints = dict.fromkeys(server.take_complaints())
        for complaint in complaints:
            if complaint not in before:
                logger.warning("%s", complaint)
        before = set(complaints)
        time.sleep(COMPLAINT_SECONDS)


def _import_executor(name: str) -> None:
    """Torch takes seconds; a simulation needs none."""
    if name != "sim":
        importlib.import_module("rustvllm.executor.uniproc")


def _make_reporter(core: EngineCore, rank: int) -> StatReporter | None:
    """The line with statistics: here, so that there is one per engine, however many front ends it has."""
    if not core.config.log_stats:
        return None
    handle = core.handle
    return StatReporter(lambda: [EngineMetrics.from_core(rank, handle.metrics())], [LoggingStatLogger], core.config)


def _listen(core: EngineCore, order: Mapping[str, Any]) -> "_core.EngineServer":
    address = EngineAddress.parse(order["address"])
    info = dump_info(core.config)
    try:
        if address.path is not None:
            return _core.EngineServer(core.handle, address.path, info=info)
        return _core.EngineServer(
            core.handle,
            tcp_address=address.resolve(),
            secret=_secret(order),
            info=info,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the engine cannot listen on {address}: {error}") from error


def _secret(order: Mapping[str, Any]) -> bytes | None:
    """What clients over TCP, and other nodes of the model, must know."""
    secret = order.get("secret")
    return None if secret is None else base64.b64decode(secret)


class _Stop:
    """Whether the engine is to end; setting it wakes the engine."""

    def __init__(self) -> None:
        self.is_set = False
        self.handle: _core.EngineHandle | None = None

    def set(self) -> None:
        self.is_set = True
        if self.handle is not None:
            self.handle.wake()


if __name__ == "__main__":
    # Taking torch apart piece by piece takes seconds, and nothing is left to be done.
    serving_output.leave(main())
