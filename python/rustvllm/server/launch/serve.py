"""``rustvllm serve``: binds the port, then serves in several processes or in one.

It ends within two seconds when told to, with exit code 0; after a failed load or a dead engine with one message and 1.
"""

import argparse
import atexit
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from rustvllm.config.flags.fields import with_flag_names
from rustvllm.exceptions import ConfigError, RustVLLMError
from rustvllm.logger import init_logger, register_secrets
from rustvllm.observe.trace.tracer import masked_command_line
from rustvllm.process.open_files import OpenFiles, raise_limit, warn_if_small
from rustvllm.process.output import serving_output
from rustvllm.server.flags.api_keys import API_KEY_VARIABLE
from rustvllm.server.flags.log_args import configure_logging
from rustvllm.server.flags.serve_args import add_cli_args, add_unsupported_args
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.launch import console
from rustvllm.server.launch.launcher import Launcher
from rustvllm.server.launch.listen import Listener, listen_tcp, listen_unix
from rustvllm.server.launch.process_layout import ProcessLayout

if TYPE_CHECKING:
    from rustvllm.engine.async_llm import AsyncLLM
    from rustvllm.server.api_server import EngineFactory
    from rustvllm.server.state import ServerState

logger = init_logger(__name__)

__all__ = ["add_cli_args", "add_unsupported_args", "run_server"]


def run_server(args: argparse.Namespace, engine_factory: "EngineFactory | None" = None) -> int:  # noqa: RET503 -- _leave
    """Serve until a signal, a failed load or a dead engine, and end the process.

    It ends the process itself rather than let the interpreter take torch apart piece by piece, which takes seconds.

    Args:
        args: Parsed flags of :func:`add_cli_args` and of the engine.
        engine_factory: Builds the engine in this process (blocking); for tests. Default: from the engine's flags.

    Returns:
        The exit code of a process that has not begun to load: 1 after an error, which has been printed. Otherwise the
        process ends with 0 after a signal and with 1 after an error.
    """
    serving_output.begin()
    listener = None
    try:
        configure_logging(args)
        raise_limit()
        serving_output.detach_handlers()
        layout = ProcessLayout.from_args(args)
        settings = ServerSettings.from_args(args)
        if (layout.starts_engines or layout.follows_head) and engine_factory is None:
            _check_engine_flags(args)
        register_secrets([*settings.api_keys, (layout.secret or b"").decode(errors="replace")])
        if layout.num_api_processes:
            listener = _listen(args, settings)
            settings = _with_known_hosts(settings, listener, args.host)
    except RustVLLMError as exc:
        console.complain(str(exc))
        return 1
    try:
        if listener is not None and (engine_factory is not None or layout.in_one_process):
            factory = engine_factory or (lambda: _build_engine(args))
            exit_code, engine_stopped = _serve_in_this_process(settings, listener, factory)
        elif layout.follows_head:
            from rustvllm.server.launch.follow import follow_head

            exit_code, engine_stopped = follow_head(args, layout, restarts=settings.restart_engine), False
        else:
            exit_code, engine_stopped = Launcher(args, layout, settings, listener).run(), False
    except RustVLLMError as exc:
        console.complain(str(exc))
        return 1
    except KeyboardInterrupt:  # before the signals were taken over
        return 0
    finally:
        if listener is not None:
            listener.close()
    _leave(exit_code, run_exit_handlers=engine_stopped)


def _check_engine_flags(args: argparse.Namespace) -> None:
    """Refuse wrong values of the engine's flags before anything is started, under the names of the flags."""
    from rustvllm.config.engine_args import AsyncEngineArgs

    try:
        AsyncEngineArgs.from_cli_args(args).check_early()
    except ConfigError as error:
        raise ConfigError(with_flag_names(str(error), AsyncEngineArgs.argument_names())) from error


def _listen(args: argparse.Namespace, settings: ServerSettings) -> Listener:
    if settings.http.tls is not None:
        from rustvllm.server.http.tls import create_ssl_context

        create_ssl_context(settings.http.tls)  # what is wrong with it is to be known now
    listener = listen_unix(args.uds) if args.uds else listen_tcp(args.host, args.port)
    if listener.is_open_to_others and not settings.api_keys:
        logger.warning(
            "listening on %s without a key: any client that reaches this machine can use the model; set %s or "
            "--host 127.0.0.1",
            args.host or "every address",
            API_KEY_VARIABLE,
        )
    return listener if settings.http.tls is None else listener.with_tls()


def _with_known_hosts(settings: ServerSettings, listener: Listener, host: str) -> ServerSettings:
    """The settings with the host's own name as the only one besides the loopback's, if nothing rules that out.

    A browser on this machine reaches a loopback address, and a page in it may have a name of its own lead there.
    Without a key it could use the model and read what others ask. A Unix socket is out of a browser's reach.
    """
    if settings.http.allowed_hosts is not None or settings.api_keys or listener.uds or listener.is_open_to_others:
        return settings
    return replace(settings, http=replace(settings.http, allowed_hosts=(host,)))


def _serve_in_this_process(
    settings: ServerSettings, listener: Listener, engine_factory: "EngineFactory"
) -> tuple[int, bool]:
    """API and engine as threads; exit code, and whether the engine has stopped."""
    _leave_on_signals(listener)
    console.say_listening(listener)
    from rustvllm.server.api_server import ApiServer

    def on_ready(state: "ServerState") -> None:
        console.say_ready(
            listener,
            state.model.names[0],
            task=state.model.task,
            needs_key=bool(settings.api_keys),
            has_page=settings.has_dashboard,
        )

    return ApiServer(
        settings,
        listener.socket,
        engine_factory,
        on_ready=on_ready,
        on_error=console.complain,
        on_signal=lambda: console.say("stopping"),
    ).run()


def _leave_on_signals(listener: Listener) -> None:
    """Until the event loop takes the signals over, one ends the process on the spot.

    An exception instead would come up in the middle of whatever import is under way, and leave it half done.
    """

    def leave(*_: object) -> None:
        listener.close()
        serving_output.leave(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def _build_engine(args: argparse.Namespace) -> "AsyncLLM":
    from rustvllm.config.engine_args import AsyncEngineArgs
    from rustvllm.engine.async_llm import AsyncLLM
    from rustvllm.observe.trace.sinks import make_tracer
    from rustvllm.observe.trace.startup_records import note_command_line, note_configuration

    began_ns = time.monotonic_ns()
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config()
    warn_if_small(OpenFiles.of_this_process(), 1, config.scheduler.max_num_seqs)
    overlap = config.scheduler.async_scheduling
    tracer = make_tracer(config.tracing, "server", owns_file=True, has_overlap=overlap)
    note_command_line(tracer, masked_command_line(sys.argv), began_ns)
    note_configuration(tracer, engine_args, config, began_ns)
    return AsyncLLM(config, multiprocess=False, tracer=tracer)


def _leave(exit_code: int, *, run_exit_handlers: bool) -> NoReturn:
    """End the process without waiting for its threads (a load, a tokenisation or a step in progress)."""
    if run_exit_handlers:
        atexit._run_exitfuncs()  # noqa: SLF001 -- what leaving in the ordinary way would run
    serving_output.leave(exit_code)
