"""``rustvllm serve``: binds the port, loads the model beside it, serves, and ends within two seconds when told to.

The life of a server: the socket listens; ``/health`` answers ``loading`` while a thread builds the engine; requests are
served; a signal turns new ones away, ends the open ones and stops the engine. A failed load and a dead engine end the
process with one message and exit code 1.
"""

import argparse
import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from rustvllm.entrypoints.openai.cli_args import add_cli_args, api_keys, read_chat_template
from rustvllm.entrypoints.openai.listen import Listener, listen_tcp, listen_unix
from rustvllm.exceptions import EngineDeadError, RustVLLMError
from rustvllm.logger import init_logger, redact

if TYPE_CHECKING:
    import uvicorn

    from rustvllm.engine.async_llm import AsyncLLM
    from rustvllm.entrypoints.openai.state import ServerState

__all__ = ["add_cli_args", "run_server"]

logger = init_logger(__name__)

CLOSE_SECONDS = 0.6
"""After a stop: how long open answers may take to end once their requests are aborted."""
BREAK_SECONDS = 0.3
"""After that: how long the connections that were then broken may take to be gone."""
ENGINE_STOP_SECONDS = 0.5
"""After that: how long the engine's thread may take to end its step before the process leaves it behind."""
HARD_STOP_SECONDS = 1.9
"""After a stop: when the kernel ends the process whatever it is doing, for instance holding the interpreter."""
SIGNAL_ECHO_SECONDS = 0.3
"""A launcher may pass on a signal that the terminal has sent as well: one within this time is no second one."""
ENGINE_WATCH_SECONDS = 0.25

EngineFactory = Callable[[], "AsyncLLM"]


def run_server(args: argparse.Namespace, engine_factory: EngineFactory | None = None) -> int:  # noqa: RET503 -- _leave
    """Serve until a signal, a failed load or a dead engine, and end the process.

    It ends the process itself rather than let the interpreter take torch apart piece by piece, which takes seconds.

    Args:
        args: Parsed flags of :func:`add_cli_args` and of the engine.
        engine_factory: Builds the engine (blocking); for tests. Default: from the engine's flags.

    Returns:
        The exit code of a process that has not begun to load: 1 after an error, which has been printed. Otherwise the
        process ends with 0 after a signal and with 1 after an error.
    """
    try:
        chat_template = read_chat_template(args.chat_template)
        listener = listen_unix(args.uds) if args.uds else listen_tcp(args.host, args.port)
    except RustVLLMError as exc:
        _complain(str(exc))
        return 1
    try:
        _leave_on_signals(listener)
        print(f"rustvllm: listening on {_where(listener)}, loading the model", flush=True)
        server = _Server(args, listener, chat_template, engine_factory or (lambda: _build_engine(args)))
        exit_code, engine_stopped = server.run()
    except KeyboardInterrupt:  # before the loop took the signals over
        return 0
    finally:
        listener.close()
    _leave(exit_code, run_exit_handlers=engine_stopped)


def _leave_on_signals(listener: Listener) -> None:
    """Until the event loop takes the signals over, one ends the process on the spot.

    An exception instead would come up in the middle of whatever import is under way, and leave it half done.
    """

    def leave(*_: object) -> None:
        listener.close()
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def _build_engine(args: argparse.Namespace) -> "AsyncLLM":
    from rustvllm.engine.async_llm import AsyncLLM
    from rustvllm.engine_args import AsyncEngineArgs

    return AsyncLLM.from_engine_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())


class _Server:
    """One run of the server; everything but the loading thread happens on the event loop."""

    def __init__(
        self, args: argparse.Namespace, listener: Listener, chat_template: str | None, engine_factory: EngineFactory
    ) -> None:
        import uvicorn

        from rustvllm.entrypoints.openai.app import build_app
        from rustvllm.entrypoints.openai.state import ServerSettings, ServerState

        self._listener = listener
        self._engine_factory = engine_factory
        self._engine: AsyncLLM | None = None
        self._shutdown_timeout: float = args.shutdown_timeout
        self._exit_code = 0
        self._stopped = asyncio.Event()
        self._load_thread = threading.Thread(target=self._load, name="rustvllm-load", daemon=True)
        self._executor = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="rustvllm-tokenize")
        self._tasks: set[asyncio.Task[None]] = set()
        self.state: ServerState = ServerState(
            ServerSettings(
                api_keys=api_keys(args),
                chat_template=chat_template,
                trust_request_chat_template=args.trust_request_chat_template,
                enable_prompt_tokens_details=args.enable_prompt_tokens_details,
                enable_force_include_usage=args.enable_force_include_usage,
                enable_docs=not args.disable_fastapi_docs,
                max_body_bytes=args.max_body_bytes,
            )
        )
        self._http = _make_uvicorn(
            uvicorn.Config(
                build_app(self.state),
                http=_http_implementation(),
                ws="none",
                lifespan="off",
                log_level=args.uvicorn_log_level,
                access_log=args.enable_access_log,
                server_header=False,
                root_path=args.root_path,
                timeout_graceful_shutdown=1,
            )
        )

    def run(self) -> tuple[int, bool]:
        """Run the event loop to the end.

        Returns:
            The exit code, and whether the engine has stopped (or never was).
        """
        self._loop = _new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.set_default_executor(self._executor)
        self._loop.run_until_complete(self._serve())
        return self._exit_code, self._stop_engine()

    async def _serve(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener.socket]))
        self._load_thread.start()
        stop = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if serving.done() and not self._stopped.is_set():
            _complain(f"the HTTP server ended: {serving.exception() or 'without a reason'}")
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
        from rustvllm.entrypoints.openai.state import ServerStatus

        if self.state.status is not ServerStatus.DEAD:
            self.state.status = ServerStatus.STOPPING
            deadline = time.monotonic() + self._shutdown_timeout
            while self.state.num_open_requests and time.monotonic() < deadline:  # noqa: ASYNC110 -- requests tell nobody
                await asyncio.sleep(0.05)
            await self.state.abort_all()

    # -- loading --------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Runs in the loading thread."""
        try:
            engine = self._engine_factory()
        except BaseException as exc:  # noqa: BLE001 -- reported in the event loop
            self._call_in_loop(self._on_load_failure, exc)
        else:
            self._call_in_loop(self._on_loaded, engine)

    def _call_in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_loaded(self, engine: "AsyncLLM") -> None:
        self._engine = engine
        if self._stopped.is_set():
            return
        try:
            self.state.set_ready(engine)
        except RustVLLMError as exc:
            self._on_load_failure(exc)
            return
        self._spawn(self._watch_engine(engine))
        _print_ready(self._listener, self.state)

    def _on_load_failure(self, exc: BaseException) -> None:
        if self._stopped.is_set():
            return
        if isinstance(exc, RustVLLMError):
            _complain(str(exc))
        else:
            _complain(f"loading the model failed: {type(exc).__name__}: {exc}")
            if not isinstance(exc, OSError | MemoryError):  # nobody foresaw this one: show where it came from
                traceback.print_exception(exc)
        self._stop(1)

    # -- running and stopping -------------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_engine(self, engine: "AsyncLLM") -> None:
        """End the process when the engine is dead: what started it can then start it again."""
        from rustvllm.entrypoints.openai.state import ServerStatus

        while not self._stopped.is_set():
            if engine.errored:
                self.state.status = ServerStatus.DEAD
                try:
                    engine.check_health()
                except EngineDeadError as exc:
                    _complain(f"{exc}; stopping the server")
                self._stop(1)
            await asyncio.sleep(ENGINE_WATCH_SECONDS)

    def _on_signal(self) -> None:
        """First signal: stop in order. A later one ends the process at once, by the system's own default."""
        if self._stopped.is_set():
            return
        print("rustvllm: stopping", flush=True)
        self._loop.call_later(SIGNAL_ECHO_SECONDS, self._restore_signals)
        self._stop(0)

    def _restore_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def _stop(self, exit_code: int) -> None:
        # Nothing from here on may keep the process longer than promised, not even code that holds the interpreter.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, HARD_STOP_SECONDS + self._shutdown_timeout)
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


def _leave(exit_code: int, *, run_exit_handlers: bool) -> NoReturn:
    """End the process without waiting for its threads (a load, a tokenisation or a step in progress)."""
    if run_exit_handlers:
        atexit._run_exitfuncs()  # noqa: SLF001 -- what leaving in the ordinary way would run
    with contextlib.suppress(OSError):  # nobody reads any more what is printed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _make_uvicorn(config: "uvicorn.Config") -> "uvicorn.Server":
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn without its signal handlers, which would end the process by the signal they caught."""

        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield

    return Server(config)


def _http_implementation() -> str:
    try:
        import httptools  # noqa: F401 - whether it is there
    except ImportError:
        return "h11"
    return "httptools"


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _where(listener: Listener) -> str:
    return listener.url if listener.uds is None else str(listener.uds)


def _print_ready(listener: Listener, state: "ServerState") -> None:
    name = state.model.names[0]
    key = ' -H "Authorization: Bearer YOUR_KEY"' if state.settings.api_keys else ""
    body = json.dumps({"model": name, "prompt": "Once upon a time", "max_tokens": 32})
    print(
        f"rustvllm: ready, serving {name} on {_where(listener)}\n"
        "Try it:\n"
        f"  curl {listener.curl_target()}/v1/completions -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}",
        flush=True,
    )


def _complain(message: str) -> None:
    print(redact(f"rustvllm serve: error: {message}"), file=sys.stderr, flush=True)
