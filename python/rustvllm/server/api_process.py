"""The API process: ``python -m rustvllm.server.api_process``, started by :class:`Launcher` alone.

It inherits the listening socket and gets its settings, then its engines' addresses, as JSON from standard input. It has
no torch: the model runs in the engines' processes.
"""

import base64
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rustvllm import envs
from rustvllm.config import EngineConfig
from rustvllm.config.engine_args import resolve_tokenizer
from rustvllm.engine.core_client.remote import RemoteClient
from rustvllm.exceptions import ModelLoadError, RustVLLMError
from rustvllm.logger import init_logger, register_secrets
from rustvllm.observe.trace.sinks import make_tracer
from rustvllm.process.address import EngineAddress
from rustvllm.process.config_json import build
from rustvllm.process.output import serving_output
from rustvllm.process.parent_link import ParentLink
from rustvllm.process.stall_watch import StallWatch
from rustvllm.process.startup_memory import explain_shortage
from rustvllm.server.flags.settings import ServerSettings
from rustvllm.server.request_load import ServerLoad

if TYPE_CHECKING:
    from rustvllm.engine.async_llm import AsyncLLM
    from rustvllm.server.state import ServerState

logger = init_logger(__name__)

_A_LONG_TIME = 10 * 365 * 86400.0
"""How long to wait for engines that this process's launcher starts: it ends this process when they fail."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve.

    Returns:
        The exit code: 0 after a request to stop, 1 when it has no engine or could not start.
    """
    flags = ("--listen-fd", "--load-fd", "--index")
    link = ParentLink.from_command_line("python -m rustvllm.server.api_process", argv, *flags)
    try:
        serving_output.begin()
        from rustvllm.server.api_server import ApiServer

        phases = {"import": link.age}
        settings = build(ServerSettings, link.receive()["settings"], "settings")
        listener = socket.socket(fileno=int(link.args.listen_fd))
        load = ServerLoad.attach(int(link.args.load_fd), int(link.args.index))
        register_secrets(settings.api_keys)
    except BaseException as error:
        link.say_error(error)
        if explain_shortage(error) is None:
            raise
        return 1

    def on_ready(state: "ServerState") -> None:
        phases["engine"] = link.age - phases["import"]
        model = state.model
        link.say_ready(link.age, phases, model=model.names[0], task=model.task)

    try:
        server = ApiServer(
            settings,
            listener,
            lambda: connect(link.receive(), settings),
            on_ready=on_ready,
            on_error=lambda message: link.say(death=message),
            load=load,
        )
    except RustVLLMError as error:  # a flag that only this process can check
        link.say_error(error)
        return 1
    exit_code, _ = server.run()
    return exit_code


def connect(order: Mapping[str, Any], settings: ServerSettings) -> "AsyncLLM":
    """The front end of the engines that the launcher names, with this server's own traces.

    Raises:
        RustVLLMError: They cannot be reached, or their tokenizer is not on this machine.
    """
    from rustvllm.engine.async_llm import AsyncLLM

    addresses = [EngineAddress.parse(text) for text in order["addresses"]]
    secret = None if order["secret"] is None else base64.b64decode(order["secret"])
    tracing = settings.tracing
    tracer = make_tracer(tracing, order["name"], owns_file=False)
    if order["config"] is not None:  # of engines that are still loading
        client = RemoteClient(addresses, secret, timeout=_A_LONG_TIME, are_loaded=order["are_loaded"])
        config = build(EngineConfig, order["config"])
        return AsyncLLM(replace(config, tracing=tracing), client=client, tracer=tracer)
    # No process of this server can end those that hang: they are left.
    watch = StallWatch(settings.stall_timeout) if settings.stall_action == "end" else None
    timeout = envs.engine_ready_timeout()
    client = RemoteClient(addresses, secret, timeout, are_loaded=True, stall_watch=watch)
    client.wait_until_ready()
    config = localise(client.read_config(), order["tokenizer"], order["served_model_name"])
    return AsyncLLM(replace(config, tracing=tracing), client=client, tracer=tracer)


def localise(config: EngineConfig, tokenizer: str | None, served_model_name: Sequence[str] | None) -> EngineConfig:
    """The configuration of an engine elsewhere as it is to be read here.

    Args:
        config: As the engine says it; its folders may be another machine's.
        tokenizer: Folder or hub name to use instead of the engine's.
        served_model_name: Names to serve the model under instead of the engine's.

    Raises:
        ModelLoadError: The tokenizer is not here.
    """
    model = config.model
    if served_model_name:
        model = replace(model, served_model_name=tuple(served_model_name))
    path = model.tokenizer_path
    if tokenizer is not None:
        path = resolve_tokenizer(tokenizer, config.load.download_dir)
    elif path is not None and not path.is_dir():
        name = model.tokenizer or model.model
        try:
            path = resolve_tokenizer(name, config.load.download_dir)
        except ModelLoadError as error:
            raise ModelLoadError(
                f"the engine reads its tokenizer from {path}, which is not on this machine, and {name} cannot be found "
                f"either ({error}): copy the folder here, or name another with --tokenizer"
            ) from error
    return replace(config, model=replace(model, tokenizer_path=None if path is None else Path(path)))


if __name__ == "__main__":
    serving_output.leave(main())  # without waiting for its threads: a load, or a tokenisation in progress
