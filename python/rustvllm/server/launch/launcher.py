""":class:`Launcher`: starts the engine and API processes of one server, watches them, and ends them.

It computes nothing and serves nothing: neither torch nor FastAPI is imported here. A thread per child waits for what
that has to say and for its end; signals and these threads put events into one queue, and the main thread handles them
one after the other.
"""

import argparse
import base64
import contextlib
import dataclasses
import os
import queue
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from rustvllm.config import EngineConfig, devices
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.exceptions import ConfigError, RustVLLMError
from rustvllm.logger import init_logger
from rustvllm.observe.inspect.description import describe_engine
from rustvllm.observe.trace.sinks import make_tracer
from rustvllm.observe.trace.startup_records import note_command_line, note_configuration
from rustvllm.observe.trace.tracer import masked_command_line
from rustvllm.process.address import EngineAddress
from rustvllm.process.child import ChildProcess
from rustvllm.process.config_json import dump_info, plain
from rustvllm.process.engine_child import EngineProcess
from rustvllm.process.open_files import OpenFiles, warn_if_small
from rustvllm.process.output.serving_output import leave as leave_process
from rustvllm.process.run_directory import SOCKET_NAME, choose_run_directory
from rustvllm.process.startup_memory import explain_shortage
from rustvllm.server.flags.settings import SIGNAL_ECHO_SECONDS, ServerSettings
from rustvllm.server.launch import console
from rustvllm.server.launch.api_child import ApiChild
from rustvllm.server.launch.listen import Listener
from rustvllm.server.launch.orphans import reap_orphans
from rustvllm.server.launch.process_layout import ProcessLayout
from rustvllm.server.launch.restart_budget import RestartBudget
from rustvllm.server.launch.stall_guard import StallGuard
from rustvllm.server.request_load import clear_load, create_load_memory

logger = init_logger(__name__)

API_STOP_SECONDS = 2.0
"""How long an API process may take to end beyond the time that open requests are given."""
ENGINE_STOP_SECONDS = 0.6
"""How long an engine may take to end its step once no API process uses it; then it is killed."""
SIGNAL_SECONDS = 0.5
"""How soon a signal is heeded that another thread got, as it may when the process was stopped (Ctrl-Z) and goes on: its
handler runs in the main thread, and nothing but this wakes that."""


class Launcher:
    """One server of several processes.

    Args:
        args: Parsed flags of the server and of the engine.
        layout: Which processes.
        settings: Of the API processes.
        listener: The socket they share; None without any.
    """

    def __init__(
        self, args: argparse.Namespace, layout: ProcessLayout, settings: ServerSettings, listener: Listener | None
    ) -> None:
        self._args = args
        self._layout = layout
        self._settings = settings
        self._listener = listener
        self._load_memory = create_load_memory()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engines: dict[int, EngineProcess] = {}
        self._apis: dict[int, ApiChild] = {}
        self._guards: dict[int, StallGuard] = {}
        self._ready: weakref.WeakSet[ChildProcess] = weakref.WeakSet()
        self._executor: str = getattr(args, "executor", None) or "auto"
        self._config: EngineConfig | None = None
        self._addresses = list(layout.addresses)
        self._budgets = {"engine": RestartBudget(), "API": RestartBudget()}
        self._has_been_ready = False
        self._exit_code: int | None = None
        self._stopped_at = 0.0
        self._deadline: float | None = None

    def run(self) -> int:
        """Start everything and stay until all of it has ended.

        Returns:
            The exit code: 0 after a signal, 1 after an error, which was printed.
        """
        try:
            self._directory = choose_run_directory()
            self._tracer = make_tracer(self._settings.tracing, "launcher", owns_file=True)
        except ConfigError as error:
            console.complain(str(error))
            return 1
        note_command_line(self._tracer, masked_command_line(sys.argv))
        try:
            self._leave_on_signals()
            if self._listener is not None:
                console.say_listening(self._listener)
            self._start()
            self._take_signals()
            while self._engines or self._apis:
                try:
                    event = self._events.get(timeout=self._patience())
                except queue.Empty:
                    self._kill_overdue_children()
                    reap_orphans({child.pid for child in (*self._engines.values(), *self._apis.values())})
                else:
                    event()
        except (RustVLLMError, OSError) as error:
            console.complain(explain_shortage(error) or str(error))
            self._exit_code = 1
        finally:
            self._kill_all()
            shutil.rmtree(self._directory, ignore_errors=True)
            self._close_trace()
        return self._exit_code or 0

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start every process, then send each what to load: they import their modules meanwhile."""
        layout = self._layout
        if layout.starts_engines:
            for rank in range(layout.num_engines):
                self._engines[rank] = EngineProcess(self._directory, self._executor, rank)
        for index in range(layout.num_api_processes):
            self._apis[index] = self._start_api(index)
        if layout.starts_engines:
            began_ns = time.monotonic_ns()
            engine_args = AsyncEngineArgs.from_cli_args(self._args)
            config = engine_args.create_engine_config()
            note_configuration(self._tracer, engine_args, config, began_ns)
            parallel = dataclasses.replace(
                config.parallel,
                data_parallel_size=layout.num_engines,
                stall_timeout=float(self._settings.stall_timeout or 0),
            )
            self._config = dataclasses.replace(config, parallel=parallel)
            dump_info(self._config)  # too long is known now, and not after the load
            self._gpus = self._share_gpus()
            num_at_once = config.scheduler.max_num_seqs * layout.num_engines
            if layout.num_api_processes:
                warn_if_small(OpenFiles.of_this_process(), layout.num_api_processes, num_at_once)
            self._addresses = self._addresses or [
                EngineAddress(path=self._directory / SOCKET_NAME.format(rank=rank)) for rank in self._engines
            ]
        for rank, engine in self._engines.items():
            self._load(rank, engine)
        for index, api in self._apis.items():
            self._connect(index, api)

    def _start_api(self, index: int) -> ApiChild:
        assert self._listener is not None
        return ApiChild(self._directory, index, self._listener.socket.fileno(), self._load_memory, self._settings)

    def _share_gpus(self) -> list[str | None]:
        """Which GPUs each engine has, one for each of its ranks; None: whatever it finds."""
        assert self._config is not None
        num_engines = self._layout.num_engines
        if num_engines == 1 or self._config.device.device != "cuda":
            return [None] * num_engines
        gpus = devices.visible_gpus()
        size = self._config.parallel.tensor_parallel_size
        if len(gpus) < num_engines * size:
            each = "a GPU" if size == 1 else f"{size} GPUs (--tensor-parallel-size)"
            raise ConfigError(
                f"--data-parallel-size {num_engines} needs {each} for each engine, but this machine has {len(gpus)} "
                "that can be used: lower it, or check CUDA_VISIBLE_DEVICES"
            )
        return [",".join(gpus[rank * size : (rank + 1) * size]) for rank in range(num_engines)]

    def _load(self, rank: int, engine: EngineProcess) -> None:
        assert self._config is not None
        engine.load(self._config, self._addresses[rank], self._layout.secret, self._gpus[rank])
        self._watch(engine, partial(self._on_engine_ready, rank, engine), partial(self._on_engine_end, rank, engine))

    def _connect(self, index: int, api: ApiChild) -> None:
        names = getattr(self._args, "served_model_name", None)
        secret = self._layout.secret
        api.order(
            {
                "name": f"API process {index}",
                "addresses": [str(address) for address in self._addresses],
                "secret": None if secret is None else base64.b64encode(secret).decode(),
                "config": None if self._config is None else plain(self._config),
                "are_loaded": self._ready.issuperset(self._engines.values()),
                "tokenizer": getattr(self._args, "tokenizer", None),
                "served_model_name": [names] if isinstance(names, str) else names,
            }
        )
        self._watch(api, partial(self._on_api_ready, api), partial(self._on_api_end, index, api))

    def _watch(
        self, child: ChildProcess, on_ready: Callable[[], None], on_end: Callable[[RustVLLMError | None], None]
    ) -> None:
        """Have a thread wait for a child: until it is ready, then until it ends."""

        def wait() -> None:
            failure = None
            try:
                child.wait_until_ready()
            except RustVLLMError as error:
                failure = error
            else:
                self._events.put(on_ready)
            child.wait_for_end()
            self._events.put(partial(on_end, failure))

        threading.Thread(target=wait, name=f"rustvllm-{child.name}", daemon=True).start()

    # -- what happens ---------------------------------------------------------------------------------------------

    def _on_engine_ready(self, rank: int, engine: EngineProcess) -> None:
        self._ready.add(engine)
        if port := engine.ready.get("tcp_port"):  # asked for as 0, perhaps; an engine in its place is to have the same
            self._addresses[rank] = dataclasses.replace(self._addresses[rank], port=port)
        if self._settings.stall_action == "end":
            self._guards[rank] = StallGuard(
                self._addresses[rank],
                self._layout.secret,
                rank,
                self._settings.stall_timeout,
                lambda why: self._events.put(partial(self._on_stall, rank, engine, why)),
            )
        console.say_phases(f"engine {rank}", engine.ready["seconds"], engine.ready["phases"])
        if self._layout.addresses or not self._apis:
            console.say(f"engine {rank} listens on {self._addresses[rank]}")
        self._say_when_ready()

    def _on_api_ready(self, api: ApiChild) -> None:
        self._ready.add(api)
        console.say_phases(api.name, api.ready["seconds"], api.ready["phases"])
        self._say_when_ready()

    def _say_when_ready(self) -> None:
        if self._has_been_ready or not self._ready.issuperset([*self._engines.values(), *self._apis.values()]):
            return
        self._has_been_ready = True
        if self._config is not None:
            ready = self._engines[min(self._engines)].ready
            config = self._config.with_max_model_len(ready["max_model_len"])
            for line in describe_engine(config, ready["num_blocks"]):
                logger.info("%s", line)
        if self._listener is not None:
            served, settings = self._apis[min(self._apis)].ready, self._settings
            console.say_ready(
                self._listener,
                served["model"],
                task=served["task"],
                needs_key=bool(settings.api_keys),
                has_page=settings.has_dashboard,
            )
        else:
            addresses = " ".join(str(self._addresses[rank]) for rank in sorted(self._engines))
            console.say(f"ready, front ends connect with: rustvllm serve --engine-address {addresses}")

    def _on_stall(self, rank: int, engine: EngineProcess, why: str) -> None:
        """Kill an engine that hangs; the launcher then acts as after any death of an engine."""
        if self._exit_code is None and self._engines.get(rank) is engine:
            engine.death = f"{why}; its process {engine.pid} is killed"
            engine.signal(signal.SIGKILL)  # it may be stopped, and then heeds no other

    def _on_engine_end(self, rank: int, engine: EngineProcess, failure: RustVLLMError | None) -> None:
        engine.close()
        del self._engines[rank]
        if (guard := self._guards.pop(rank, None)) is not None:
            guard.stop()
        if self._exit_code is not None:
            self._go_on_stopping()
            return
        why = str(failure or self._why_engine_ended(engine))
        if failure is not None and not self._has_been_ready:
            self._stop(1, why)
        elif self._settings.restart_engine and self._budgets["engine"].take():
            logger.error("%s; starting it again (%s)", why, self._budgets["engine"].used)
            self._engines[rank] = EngineProcess(self._directory, self._executor, rank)
            self._load(rank, self._engines[rank])
        elif self._engines:
            logger.error("%s; %d of %d engines continue", why, len(self._engines), self._layout.num_engines)
        else:
            limit = f", too often to start it again ({self._budgets['engine'].used})"
            self._stop(1, f"{why}{limit if self._settings.restart_engine else ''}; stopping the server")

    def _why_engine_ended(self, engine: EngineProcess) -> str:
        """Why, by the name that errors and logs have for the process: with several ranks it is the first of them."""
        size = 1 if self._config is None else self._config.parallel.num_ranks
        if engine.death is not None or size == 1:
            return engine.why_ended
        return (
            f"{engine.why_ended}: it was rank 0 (node 0, pid {engine.pid}) of {size} ranks, and the others end with it"
        )

    def _on_api_end(self, index: int, api: ApiChild, failure: RustVLLMError | None) -> None:
        api.close()
        del self._apis[index]
        clear_load(self._load_memory, index)
        if self._exit_code is not None:
            self._go_on_stopping()
        elif api.death is not None or (failure is not None and not self._has_been_ready):
            self._stop(1, str(api.death or failure))
        elif self._budgets["API"].take():
            logger.error("%s; starting it again (%s)", api.why_ended, self._budgets["API"].used)
            self._apis[index] = self._start_api(index)
            self._connect(index, self._apis[index])
        else:
            self._stop(1, f"{api.why_ended}, too often to start it again ({self._budgets['API'].used})")

    # -- stopping -------------------------------------------------------------------------------------------------

    def _leave_on_signals(self) -> None:
        """Until the main loop runs, a signal ends everything on the spot."""

        def leave(*_: object) -> None:
            self._kill_all()
            shutil.rmtree(self._directory, ignore_errors=True)
            if self._listener is not None:
                self._listener.close()
            self._close_trace()
            leave_process(0)

        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell lets its background jobs ignore Ctrl-C. A server that serves heeds it all the same, in order.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, leave)

    def _take_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._events.put(partial(self._on_signal, number)))

    def _on_signal(self, number: int) -> None:
        """First signal: stop in order. A later one ends everything at once, and this process by the signal itself."""
        if self._exit_code is None:
            console.say("stopping")
            self._stop(0)
        elif time.monotonic() - self._stopped_at > SIGNAL_ECHO_SECONDS:
            self._kill_all()
            shutil.rmtree(self._directory, ignore_errors=True)
            if self._listener is not None:
                self._listener.close()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _stop(self, exit_code: int, message: str = "") -> None:
        """Tell API processes to end; engines follow when no API process uses them."""
        if message:
            console.complain(message)
        self._exit_code, self._stopped_at = exit_code, time.monotonic()
        for api in self._apis.values():
            api.signal(signal.SIGTERM)
        self._deadline = self._stopped_at + self._settings.shutdown_timeout + API_STOP_SECONDS
        self._go_on_stopping()

    def _go_on_stopping(self) -> None:
        if self._apis:
            return
        self._deadline = time.monotonic() + ENGINE_STOP_SECONDS
        for engine in self._engines.values():
            engine.signal(signal.SIGTERM if engine in self._ready else signal.SIGKILL)

    def _patience(self) -> float:
        """Seconds to wait for an event: until the shutdown deadline at most."""
        left = SIGNAL_SECONDS if self._deadline is None else self._deadline - time.monotonic()
        return min(max(0.0, left), SIGNAL_SECONDS)

    def _kill_overdue_children(self) -> None:
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        for child in self._apis.values() or self._engines.values():
            logger.warning("the %s did not end in time; killing it", child.name)
            child.signal(signal.SIGKILL)
        self._deadline = time.monotonic() + ENGINE_STOP_SECONDS

    def _close_trace(self) -> None:
        """End the trace file: no child writes to it any more."""
        if self._tracer is not None:
            self._tracer.close()

    def _kill_all(self) -> None:
        children: list[ChildProcess] = [*self._apis.values(), *self._engines.values()]
        for child in children:
            child.signal(signal.SIGKILL)
        for child in children:
            with contextlib.suppress(OSError):
                child.wait(1.0)
