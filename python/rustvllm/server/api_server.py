""":class:`ApiServer`: uvicorn and the engine's front end on one event loop, from the first connection to the last.

Requests are answered from the start, with ``loading`` while a thread builds the front end; a stop turns new ones away,
ends the open ones and closes. What a process with an API server is for otherwise, and what it says, is its owner's.
"""

import asyncio
import concurrent.futures
import contextlib
import gc
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOG_LEVELS as _LOG_LEVELS

from rustvllm.exceptions import EngineDeadError, RustVLLMError
from rustvllm.logger import init_logger, take_over
from rustvllm.server.app import build_app
from rustvllm.server.endpoint_table import ENDPOINTS
from rustvllm.server.flags.settings import SIGNAL_ECHO_SECONDS, ServerSettings
from rustvllm.server.http.acceptor import Acceptor
from rustvllm.server.http.limited_protocol import limited_protocol
from rustvllm.server.http.tls import create_ssl_context, keep_fresh
from rustvllm.server.request_load import ServerLoad
from rustvllm.server.state import ServedModel, ServerState, ServerStatus

if TYPE_CHECKING:
    from rustvllm.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

CLOSE_SECONDS = 0.6
"""After a stop: how long open answers may take to end once their requests are aborted."""
BREAK_SECONDS = 0.3
"""After that: how long the connections that were then broken may take to be gone."""
ENGINE_STOP_SECONDS = 0.5
"""After that: how long the engine's thread may take to end its step before the process leaves it behind."""
HARD_STOP_SECONDS = 1.9
"""After a stop: when the kernel ends the process whatever it is doing, for instance holding the interpreter."""
ENGINE_WATCH_SECONDS = 0.25
RECONNECT_SECONDS = 1.0
"""How long one attempt to reach an engine that was started again may take."""

EngineFactory = Callable[[], "AsyncLLM"]


class ApiServer:
    """One run of the server; everything but the loading thread happens on the event loop.

    Args:
        settings: Of the front end.
        listener: A socket that listens.
        engine_factory: Builds the front end (blocking).
        on_ready: Called on the event loop when requests are served.
        on_error: Called there with the message of what ends the server.
        on_signal: Called there when a signal asks it to stop.
        load: The open requests of all API processes; None: this is the only one.
    """

    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        engine_factory: EngineFactory,
        *,
        on_ready: Callable[[ServerState], None],
        on_error: Callable[[str], None],
        on_signal: Callable[[], None] = lambda: None,
        load: ServerLoad | None = None,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._engine_factory = engine_factory
        self._on_ready = on_ready
        self._on_error = on_error
        self._on_signal = on_signal
        self._engine: AsyncLLM | None = None
        self._exit_code = 0
        self._stopped = asyncio.Event()
        self._load_thread = threading.Thread(target=self._load, name="rustvllm-load", daemon=True)
        self._executor = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="rustvllm-tokenize")
        self._tasks: set[asyncio.Task[None]] = set()
        self._reconnecting: set[int] = set()
        self.state = ServerState(settings, load)
        self._app = build_app(self.state)
        config = _http_config(settings, self._app)
        config.load()
        if settings.http.tls is not None:
            config.ssl = create_ssl_context(settings.http.tls)
        self._http = _Uvicorn(config)

    def run(self) -> tuple[int, bool]:
        """Run the event loop to the end.

        Returns:
            The exit code, and whether the engine has stopped (or never was).
        """
        self._loop = _new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.set_default_executor(self._executor)
        self._loop.run_until_complete(self._serve())
        self.state.close()
        return self._exit_code, self._stop_engine()

    async def _serve(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._stop_by_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        tls, context = self._settings.http.tls, self._http.config.ssl
        if tls is not None and context is not None and tls.refresh:
            self._spawn(keep_fresh(context, tls))
        self._load_thread.start()
        stop = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if serving.done() and not self._stopped.is_set():
            self._on_error(f"the HTTP server ended: {serving.exception() or 'without a reason'}")
            self._exit_code = 1
            return
        await self._drain()
        self._http.should_exit = True
        await asyncio.wait({serving}, timeout=CLOSE_SECONDS)
        self._http.force_exit = True
        for connection in list(self._http.server_state.connections):
            if connection.transport is not None:  # a client that does not read: nothing will make it
                connection.transport.abort()
        await asyncio.wait({serving}, timeout=BREAK_SECONDS)

    async def _drain(self) -> None:
        """Let open requests end by themselves for a while, then abort them."""
        if self.state.status is not ServerStatus.DEAD:
            self.state.status = ServerStatus.STOPPING
            deadline = time.monotonic() + self._settings.shutdown_timeout
            while self.state.num_open_requests and time.monotonic() < deadline:  # noqa: ASYNC110 -- a request that ends sets no event
                await asyncio.sleep(0.05)
            await self.state.abort_all()

    # -- loading --------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Runs in the loading thread."""
        try:
            engine = self._engine_factory()
        except BaseException as exc:  # noqa: BLE001 -- reported in the event loop
            self._call_in_loop(self._on_load_failure, exc)
            return
        self._engine = engine  # to be stopped, whatever becomes of its model here
        try:
            model = ServedModel(engine, self._settings)
        except BaseException as exc:  # noqa: BLE001 -- reported in the event loop
            self._call_in_loop(self._on_load_failure, exc)
        else:
            self._call_in_loop(self._on_loaded, engine, model)

    def _call_in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_loaded(self, engine: "AsyncLLM", model: ServedModel) -> None:
        if self._stopped.is_set():
            return
        self.state.set_ready(engine, model)
        self._spawn(self._watch_engine(engine))
        if self._settings.has_dashboard:
            self._spawn(self._app.state.dashboard_feed.keep_history())
        # What exists now stays as long as the server: walking through it again and again would hold up every stream.
        gc.collect()
        gc.freeze()
        self._on_ready(self.state)

    def _on_load_failure(self, exc: BaseException) -> None:
        if self._stopped.is_set():
            return
        if isinstance(exc, RustVLLMError):
            self._on_error(str(exc))
        else:
            self._on_error(f"loading the model failed: {type(exc).__name__}: {exc}")
            if not isinstance(exc, OSError | MemoryError):  # unforeseen: show where it came from
                traceback.print_exception(exc)
        self._stop(1)

    # -- running and stopping -------------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_engine(self, engine: "AsyncLLM") -> None:
        """End when no engine is alive any more, or wait until one is again."""
        while not self._stopped.is_set():
            engine.leave_silent_engines()
            dead = [health.rank for health in engine.health() if health.death is not None]
            if engine.errored and not self._settings.restart_engine:
                self._end_without_engine(engine)
                return
            if engine.errored:
                self.state.status = ServerStatus.RESTARTING
            elif self.state.status is ServerStatus.RESTARTING:
                self.state.status = ServerStatus.READY
            if self._settings.restart_engine:
                for rank in set(dead) - self._reconnecting:
                    self._reconnecting.add(rank)
                    self._spawn(self._reconnect(engine, rank))
            await asyncio.sleep(ENGINE_WATCH_SECONDS)

    def _end_without_engine(self, engine: "AsyncLLM") -> None:
        """End the process when the engine is dead: what started it can then start it again."""
        self.state.status = ServerStatus.DEAD
        try:
            engine.check_health()
        except EngineDeadError as exc:
            self._on_error(f"{exc}; stopping the server")
        self._stop(1)

    async def _reconnect(self, engine: "AsyncLLM", rank: int) -> None:
        """Try until an engine of that rank is there again: who started the other starts another, or ends us too."""
        logger.warning("engine %d is gone; waiting for it to be started again", rank)
        while not self._stopped.is_set():
            try:
                await asyncio.to_thread(engine.reconnect, rank, RECONNECT_SECONDS)
            except EngineDeadError:
                await asyncio.sleep(ENGINE_WATCH_SECONDS)
            else:
                logger.warning("engine %d is back", rank)
                break
        self._reconnecting.discard(rank)

    def _stop_by_signal(self) -> None:
        """First signal: stop in order. A later one ends the process at once, by the system's own default."""
        if self._stopped.is_set():
            return
        self._on_signal()
        self._loop.call_later(SIGNAL_ECHO_SECONDS, self._restore_signals)
        self._stop(0)

    def _restore_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, exit_code: int) -> None:
        # Nothing from here on may keep the process longer than promised, not even code that holds the interpreter.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, HARD_STOP_SECONDS + self._settings.shutdown_timeout)
        self._exit_code = exit_code
        self._stopped.set()

    def _stop_engine(self) -> bool:
        """Stop the engine, unless its present step takes too long; whether it has stopped."""
        engine = self._engine
        if engine is None:
            return not self._load_thread.is_alive()
        stopper = threading.Thread(target=engine.shutdown, name="rustvllm-stop", daemon=True)
        stopper.start()
        stopper.join(ENGINE_STOP_SECONDS)
        return not stopper.is_alive()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal they caught.

    Connections are accepted by :class:`Acceptor`.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        assert sockets is not None
        config = self.config

        def make_protocol() -> Any:
            kind: Any = config.http_protocol_class
            return kind(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        paths = {row.path for row in ENDPOINTS if row.is_answered_when_full}
        self._acceptors = [Acceptor(each, make_protocol, config.loaded_app, config.ssl, paths) for each in sockets]
        for acceptor in self._acceptors:
            acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def _http_config(settings: ServerSettings, app: FastAPI) -> uvicorn.Config:
    """uvicorn's, with our limits and our log; its own access log is off, ours stands in the application."""
    http = settings.http
    take_over("uvicorn", _LOG_LEVELS[settings.uvicorn_log_level])
    return uvicorn.Config(
        app,
        http=limited_protocol(http.max_head_bytes, http.max_header_count),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=settings.root_path,
        timeout_graceful_shutdown=1,
    )


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
