"""Records the start of an engine: the arguments, the configuration made from them, and how long each part took."""

import dataclasses
import os
from time import monotonic_ns

from rustvllm import __version__
from rustvllm.config import EngineConfig
from rustvllm.config.engine_args import EngineArgs
from rustvllm.logger import redact_mapping
from rustvllm.observe.trace.tracer import Tracer, TraceRecord
from rustvllm.text.tokenizer import Tokenizer


def note_command_line(tracer: Tracer | None, command_line: str, began_ns: int | None = None) -> None:
    """Record the command that was started.

    Args:
        tracer: Takes the record; None records nothing.
        command_line: The command line without secrets.
        began_ns: When it started, in nanoseconds of ``time.monotonic_ns``; None: now.
    """
    if tracer is not None:
        extras = {"command_line": command_line, "pid": os.getpid(), "version": __version__}
        timestamp_ns = monotonic_ns() if began_ns is None else began_ns
        tracer.write(TraceRecord(timestamp_ns, "command_line", "started", extras=extras))


def note_configuration(tracer: Tracer | None, args: EngineArgs, config: EngineConfig, began_ns: int) -> None:
    """Record the arguments that are not the default, and the configuration that was made of them since ``began_ns``."""
    if tracer is None:
        return
    given = {
        field.name: value for field in dataclasses.fields(args) if (value := getattr(args, field.name)) != field.default
    }
    tracer.write(TraceRecord(began_ns, "arguments", "given", extras=redact_mapping(given)))
    model, scheduler, cache = config.model, config.scheduler, config.cache
    tracer.note(
        "configuration",
        "made",
        began_ns,
        model=model.model,
        architecture=model.architecture,
        device=config.device.device,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        async_scheduling=scheduler.async_scheduling,
    )


def load_tokenizer(config: EngineConfig, tracer: Tracer | None) -> Tokenizer | None:
    """Load the tokenizer of a configuration; None with ``skip_tokenizer_init``.

    Raises:
        ModelLoadError: The tokenizer cannot be read.
    """
    if (folder := config.model.tokenizer_path) is None:
        return None
    began_ns = monotonic_ns()
    tokenizer = Tokenizer.from_folder(folder)
    if tracer is not None:
        tracer.note("tokenizer", "read", began_ns, vocab_size=tokenizer.vocab_size)
    return tokenizer
