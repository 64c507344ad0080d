"""``rustvllm run-batch``: answers a file of requests, in the format of OpenAI's batches, without a server.

While it runs, finished answers are in ``OUTPUT.partial``; when all are there, ``OUTPUT`` has them in the order of the
input. A run that was ended goes on with ``--resume``.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.exceptions import ConfigError, EngineDeadError, RustVLLMError
from rustvllm.logger import redact
from rustvllm.server.flags.answer_args import add_answer_args
from rustvllm.server.flags.serve_args import (
    DEFAULT_MAX_BODY_BYTES,
    add_unsupported_args,
    positive,
    read_chat_template,
)

if TYPE_CHECKING:
    from rustvllm.batch.journal import BatchJournal
    from rustvllm.batch.runner import BatchCounts
    from rustvllm.engine.async_llm import AsyncLLM

PROGRAM = "rustvllm run-batch"
EXIT_OK, EXIT_FAILURE, EXIT_LINES_FAILED = 0, 1, 3
OUTPUT_NAME = "batch-output.jsonl"
"""What the answers are called in ``--output-tmp-dir``, before they are stored at a URL."""


def make_parser() -> FlexibleArgumentParser:
    """The parser of ``rustvllm run-batch``."""
    parser = FlexibleArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} -i INPUT -o OUTPUT [--model MODEL] [flags]",
        description="Answer a file of requests in the format of OpenAI's batches: one JSON object per line with "
        "custom_id, method, url (/v1/chat/completions, /v1/completions, /v1/embeddings, /score or /rerank) and body.",
        epilog="Exit codes: 0 all lines were answered; 3 the output is complete and some of its lines are errors; "
        "1 it is not, and finished answers are in OUTPUT.partial; 128 + a signal's number: the same, after a signal.",
    )
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="INPUT", help="a file, or an http(s) URL that is fetched with GET"
    )
    group.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="OUTPUT",
        help="a file, or an http(s) URL that is written with PUT",
    )
    group.add_argument(
        "--output-tmp-dir", metavar="DIR", help="folder for answers before they are sent to a URL (default: a new one)"
    )
    group.add_argument(
        "--resume", action="store_true", help="continue from OUTPUT.partial: compute only lines without an answer"
    )
    add_answer_args(group)
    group.add_argument(
        "--enable-prompt-tokens-details", action="store_true", help="report cached prompt tokens in usage"
    )
    group.add_argument(
        "--max-body-bytes",
        type=positive,
        default=DEFAULT_MAX_BODY_BYTES,
        metavar="BYTES",
        help="longest accepted line (default: %(default)s)",
    )
    AsyncEngineArgs.add_cli_args(parser)
    add_unsupported_args(parser)
    return parser


def run_batch(argv: Sequence[str]) -> int:
    """Run ``rustvllm run-batch``.

    Returns:
        The exit code; see the parser's epilog.
    """
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    try:
        with ExitStack() as stack:
            return _run(args, stack)
    except RustVLLMError as error:
        _say(f"error: {error}")
    except OSError as error:
        _say(f"error: {error.filename or args.output_file}: {error.strerror}")
    except KeyboardInterrupt:  # before the event loop takes the signals over
        return 128 + signal.SIGINT
    return EXIT_FAILURE


def _run(args: argparse.Namespace, stack: ExitStack) -> int:
    from rustvllm.batch.journal import BatchJournal
    from rustvllm.batch.lines import count_lines
    from rustvllm.batch.remote_file import is_url

    files = _Files.choose(args, stack)
    with files.input.open("rb") as lines:
        num_lines = count_lines(lines)
    journal = stack.enter_context(BatchJournal(files.output, resume=args.resume))
    signal_number, counts = 0, None
    if num_lines:
        signal_number, counts = _answer_all(args, files.input, journal, num_lines)
    else:
        journal.finish([])
    if signal_number:
        num_answers = 0 if counts is None else counts.answered + counts.earlier
        _say(f"ended by {signal.Signals(signal_number).name}; {num_answers} answers are in {journal.path}: --resume")
        return 128 + signal_number
    where = str(files.output)
    if is_url(args.output_file):
        where = _store(files.output, args.output_file, is_own_folder=not args.output_tmp_dir)
    if counts is None:
        _say(f"the input has no lines; {where} is empty")
        return EXIT_OK
    _say(
        f"{counts.total} {'line' if counts.total == 1 else 'lines'}: {counts.answered} answered, {counts.failed} failed"
        + (f", {counts.earlier} answered before" if counts.earlier else "")
        + f"; {counts.prompt_tokens} tokens read and {counts.completion_tokens} generated in {counts.seconds:.1f} s; "
        f"the answers are in {where}"
    )
    return EXIT_LINES_FAILED if counts.failed else EXIT_OK


def _store(output: Path, url: str, *, is_own_folder: bool) -> str:
    from rustvllm.batch.remote_file import RemoteFileError, shown, upload

    try:
        upload(output, url)
    except RemoteFileError as error:
        raise RemoteFileError(f"{error}; they are in {output}") from None
    output.unlink()
    if is_own_folder:
        output.parent.rmdir()
    return shown(url)


@dataclass(frozen=True)
class _Files:
    """Where the lines are read and the answers written on this machine."""

    input: Path
    output: Path

    @classmethod
    def choose(cls, args: argparse.Namespace, stack: ExitStack) -> "_Files":
        """Fetch the input if it is elsewhere.

        Raises:
            ConfigError: No such file, or both are the same, or one is ``-``.
            RemoteFileError: It cannot be fetched.
        """
        from rustvllm.batch.journal import SUFFIX, WHOLE_SUFFIX
        from rustvllm.batch.remote_file import download, is_url

        for flag, name, stream in (("-i", args.input_file, "input"), ("-o", args.output_file, "output")):
            if name == "-":
                raise ConfigError(
                    f"{flag} - is not supported: run-batch does not use standard {stream}; name a file (./- if it is "
                    "called -)"
                )
        if is_url(args.input_file):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rustvllm-batch-"))
            source = Path(folder) / "input.jsonl"
            download(args.input_file, source)
        else:
            source = Path(args.input_file)
            if not source.is_file():
                raise ConfigError(f"the input {source} is {'not a regular file' if source.exists() else 'not there'}")
        if is_url(args.output_file):
            # The folder stays if the upload fails, so it must not remove itself.
            folder = args.output_tmp_dir or tempfile.mkdtemp(prefix="rustvllm-batch-")
            if not Path(folder).is_dir():
                raise ConfigError(f"--output-tmp-dir {folder} is not a folder")
            return cls(source, Path(folder) / OUTPUT_NAME)
        target = _followed(Path(args.output_file))
        if not target.absolute().parent.is_dir():
            raise ConfigError(f"the output's folder {target.absolute().parent} does not exist")
        if target.exists() and target.samefile(source):
            raise ConfigError(f"input and output are the same file, {target}")
        for suffix in (SUFFIX, WHOLE_SUFFIX):
            working = target.with_name(target.name + suffix)
            if working.exists() and working.samefile(source):
                raise ConfigError(
                    f"the input {source} is where run-batch keeps the answers for {target} while it runs: rename it, "
                    "or choose another output"
                )
        return cls(source, target)


def _followed(output: Path) -> Path:
    """Where a link leads, which is what shells write to; any other path stays as it was named.

    Raises:
        ConfigError: The link leads to itself.
    """
    if not output.is_symlink():
        return output
    try:
        return output.resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"the output {output} is a link that leads nowhere: {error}") from error


def _answer_all(
    args: argparse.Namespace, source: Path, journal: "BatchJournal", num_lines: int
) -> "tuple[int, BatchCounts | None]":
    """Load the model and answer; the signal that ended it (0: none), and the counts."""
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config("llm_class")
    from rustvllm.engine.async_llm import AsyncLLM

    engine = AsyncLLM(config)
    try:
        return asyncio.run(_answer(args, engine, source, journal, num_lines))
    finally:
        engine.shutdown()


async def _answer(
    args: argparse.Namespace, engine: "AsyncLLM", source: Path, journal: "BatchJournal", num_lines: int
) -> "tuple[int, BatchCounts | None]":
    from rustvllm.batch.lines import read_lines
    from rustvllm.batch.runner import BatchRunner
    from rustvllm.server.flags.settings import ServerSettings
    from rustvllm.server.state import ServerState

    ending = _EndBySignal()
    state = ServerState(
        ServerSettings(
            chat_template=read_chat_template(args.chat_template),
            default_chat_template_kwargs=args.default_chat_template_kwargs,
            chat_template_content_format=args.chat_template_content_format,
            response_role=args.response_role,
            return_tokens_as_token_ids=args.return_tokens_as_token_ids,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            default_thinking_token_budget=args.default_thinking_token_budget,
            reasoning_end_text=args.reasoning_end_text,
            exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
            reasoning_field=args.reasoning_field,
            tool_call_constraint=args.tool_call_constraint,
            enable_prompt_tokens_details=args.enable_prompt_tokens_details,
            # The line that holds it was bounded already, and JSON can be longer written in another way.
            max_body_bytes=8 * args.max_body_bytes,
        )
    )
    state.set_ready(engine)
    try:
        with _Progress(num_lines) as progress, source.open("rb") as file:
            runner = BatchRunner(state, journal, progress)
            begin = time.monotonic()
            try:
                places = await runner.run(read_lines(file, state.model.names[0], args.max_body_bytes))
            except asyncio.CancelledError:
                if not ending.number:
                    raise
                return ending.number, runner.counts
            except EngineDeadError as error:
                num_answers = runner.counts.answered + runner.counts.earlier
                raise EngineDeadError(
                    f"{error}; {num_answers} answers are in {journal.path}: continue with --resume"
                ) from None
    finally:
        state.close()
    journal.finish(places)
    runner.counts.seconds = time.monotonic() - begin
    return 0, runner.counts


class _EndBySignal:
    """Ends the present task at the first SIGINT or SIGTERM; a second one ends the process."""

    def __init__(self) -> None:
        self.number = 0
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._end, number)

    def _end(self, number: int) -> None:
        self.number = number
        for each in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        if self._task is not None:
            self._task.cancel()


class _Progress:
    """A bar on a terminal; elsewhere nothing."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="line", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, counts: "BatchCounts") -> None:
        """Show the counts so far."""
        if self._bar is not None:
            if counts.failed:
                self._bar.set_postfix_str(f"{counts.failed} failed", refresh=False)
            self._bar.update(counts.total - self._bar.n)


def _say(message: str) -> None:
    try:
        print(redact(f"{PROGRAM}: {message}"), file=sys.stderr, flush=True)
    except OSError:  # it has no reader, or the disk is full; the answers are elsewhere, and the exit code is theirs
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
