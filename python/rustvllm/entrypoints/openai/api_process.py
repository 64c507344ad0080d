"""The API process: ``python -m rustvllm.entrypoints.openai.api_process``, started by :class:`Launcher` and nobody else.

It inherits the listening socket and gets its settings, then its engines' addresses, as JSON from standard input. It has
no torch: the model runs in the engines' processes.
"""

import base64
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rustvllm import envs
from rustvllm.config import EngineConfig, TracingConfig
from rustvllm.engine.address import EngineAddress
from rustvllm.engine.config_json import build
from rustvllm.engine.parent_link import ParentLink
from rustvllm.engine.remote_client import RemoteClient
from rustvllm.engine.trace_sinks import make_tracer
from rustvllm.engine_args import resolve_tokenizer
from rustvllm.entrypoints.openai.server_load import ServerLoad
from rustvllm.entrypoints.openai.settings import ServerSettings
from rustvllm.exceptions import ModelLoadError, RustVLLMError
from rustvllm.logger import init_logger, register_secrets

if TYPE_CHECKING:
    from rustvllm.engine.async_llm import AsyncLLM
    from rustvllm.entrypoints.openai.state import ServerState

logger = init_logger(__name__)

_A_LONG_TIME = 10 * 365 * 86400.0
"""How long to wait for engines that this process's launcher starts: it ends this process when they fail."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve.

    Returns:
        The exit code: 0 when it was told to stop, 1 when it has no engine or could not start.
    """
    flags = ("--listen-fd", "--load-fd", "--index")
    link = ParentLink.from_command_line("python -m rustvllm.entrypoints.openai.api_process", argv, *flags)
    try:
        from rustvllm.entrypoints.openai.api_server import ApiServer

        phases = {"import": link.age}
        settings = build(ServerSettings, link.receive()["settings"], "settings")
        listener = socket.socket(fileno=int(link.args.listen_fd))
        load = ServerLoad.attach(int(link.args.load_fd), int(link.args.index))
        register_secrets(settings.api_keys)
    except BaseException as error:
        link.say_error(error)
        raise

    def on_ready(state: "ServerState") -> None:
        phases["engine"] = link.age - phases["import"]
        link.say_ready(link.age, phases, model=state.model.names[0])

    try:
        server = ApiServer(
            settings,
            listener,
            lambda: connect(link.receive(), settings.tracing),
            on_ready=on_ready,
            on_error=lambda message: link.say(death=message),
            load=load,
        )
    except RustVLLMError as error:  # a flag that only this process can judge
        link.say_error(error)
        return 1
    exit_code, _ = server.run()
    return exit_code


def connect(order: Mapping[str, Any], tracing: TracingConfig) -> "AsyncLLM":
    """The front end of the engines that the launcher names, with this server's own traces.

    Raises:
        RustVLLMError: They cannot be reached, or their tokenizer is not on this machine.
    """
    from rustvllm.engine.async_llm import AsyncLLM

    addresses = [EngineAddress.parse(text) for text in order["addresses"]]
    secret = None if order["secret"] is None else base64.b64decode(order["secret"])
    tracer = make_tracer(tracing, order["name"], owns_file=False)
    if order["config"] is not None:  # of engines that are still loading
        client = RemoteClient(addresses, secret, timeout=_A_LONG_TIME)
        config = build(EngineConfig, order["config"])
        return AsyncLLM(replace(config, tracing=tracing), client=client, tracer=tracer)
    client = RemoteClient(addresses, secret, timeout=envs.engine_ready_timeout())
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
                f"the engine reads its tokenizer from {path}, which is not on this machine, and neither is {name} "
                f"({error}): copy the folder here or name another with --tokenizer"
            ) from error
    return replace(config, model=replace(model, tokenizer_path=None if path is None else Path(path)))


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):  # nobody reads any more what is printed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # without waiting for its threads: a load, or a tokenisation in progress
