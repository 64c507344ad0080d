"""``rustvllm trace``: the life of a request, printed step by step, in an engine of its own."""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.config.engine_args import EngineArgs
from rustvllm.exceptions import ConfigError, RustVLLMError
from rustvllm.logger import redact

if TYPE_CHECKING:
    from rustvllm.config import EngineConfig
    from rustvllm.lora.request import LoRARequest
    from rustvllm.observe.trace.tracer import TraceRecord
    from rustvllm.outputs import RequestOutput
    from rustvllm.sampling_params import SamplingParams

PROGRAM = "rustvllm trace"
EXIT_OK, EXIT_FAILURE, EXIT_INTERRUPTED = 0, 1, 130
MAX_NEIGHBOURS = 256
MAX_REPEATS = 100


def make_parser() -> FlexibleArgumentParser:
    """The parser of ``rustvllm trace``."""
    parser = FlexibleArgumentParser(
        prog=PROGRAM,
        usage="rustvllm trace [MODEL] PROMPT [flags]",
        description="Run one request in an engine of its own and print its life step by step.",
    )
    parser.add_argument(
        "positional",
        metavar="MODEL PROMPT",
        nargs="+",
        help="a folder or a hub name (default: the model inside the package), and what to continue",
    )
    request = parser.add_argument_group("request", "The request to run.")
    request.add_argument(
        "--max-tokens", type=_at_least(1), default=16, metavar="N", help="most tokens of the answer (default: 16)"
    )
    request.add_argument(
        "--min-tokens", type=_at_least(0), default=0, metavar="N", help="fewest tokens of the answer (default: 0)"
    )
    request.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    request.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that have this total probability (default: 1)",
    )
    request.add_argument(
        "--top-k", type=int, default=0, help="sample from this many likeliest tokens; 0: from all (default: 0)"
    )
    request.add_argument(
        "--sampling-seed", type=int, metavar="SEED", help="seed of the sampled tokens (default: random)"
    )
    request.add_argument("--stop", nargs="+", metavar="TEXT", help="texts that end the answer")
    request.add_argument("--ignore-eos", action="store_true", help="continue past the end of sequence")
    request.add_argument("--adapter", metavar="NAME", help="adapter of the request, one of --lora-modules")
    scene = parser.add_argument_group("scenario", "What happens to the request.")
    scene.add_argument(
        "--repeat",
        type=_at_least(1, MAX_REPEATS),
        default=1,
        metavar="N",
        help="run the prompt N times; from the second time on it is in the prefix cache",
    )
    scene.add_argument(
        "--chunk",
        type=_at_least(1),
        metavar="N",
        help="at most N tokens a step, so that the prompt is computed in chunks",
    )
    scene.add_argument(
        "--neighbours",
        type=_at_least(0, MAX_NEIGHBOURS),
        default=0,
        metavar="N",
        help="start N other requests first: with few KV blocks this one is preempted",
    )
    scene.add_argument("--abort-after", type=_at_least(1), metavar="N", help="abort the request after N of its steps")
    page = parser.add_argument_group("output", "How to print it.")
    page.add_argument("--json", action="store_true", help="one JSON object with every record")
    page.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: colours at a terminal (default: auto)",
    )
    EngineArgs.add_cli_args(parser)
    return parser


def trace(argv: Sequence[str]) -> int:
    """Run ``rustvllm trace``.

    Returns:
        The exit code: 0, 1 after an error, 130 after Ctrl-C.
    """
    began_ns = time.monotonic_ns()
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    if len(args.positional) > 2:
        parser.error(f"expected two arguments, MODEL and PROMPT, got {len(args.positional)}: quote the prompt")
    if args.chunk is not None:
        if getattr(args, "max_num_batched_tokens", None) is not None:
            parser.error("--chunk and --max-num-batched-tokens mean the same: leave one out")
        args.max_num_batched_tokens = args.chunk
    if len(args.positional) == 2:
        args.model = args.positional[0]
    logger = logging.getLogger("rustvllm")
    level = logger.level
    if not os.environ.get("RUSTVLLM_LOGGING_LEVEL") and not getattr(args, "trace", False):
        logger.setLevel(logging.WARNING)  # the page says what the loaders would
    try:
        return _Scene(args, argv, began_ns).play()
    except RustVLLMError as error:
        print(redact(f"{PROGRAM}: error: {error}"), file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        logger.setLevel(level)


def _adapter_of(config: "EngineConfig", name: str) -> "LoRARequest":
    """What names an adapter that is there from the start.

    Raises:
        ConfigError: There is none of this name.
    """
    from rustvllm.lora.request import LoRARequest

    modules = () if config.lora is None else config.lora.modules
    for number, module in enumerate(modules, 1):
        if module.name == name:
            return LoRARequest(name, number)
    there = ", ".join(module.name for module in modules) or "none: set --enable-lora and --lora-modules"
    raise ConfigError(f"--adapter is {name!r:.80}, but the loaded adapters are {there}")


class _Scene:
    """One engine, the requests that are shown, and the others in its batches."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str], began_ns: int) -> None:
        from rustvllm.cli.journey_page import JourneyPage
        from rustvllm.engine.llm_engine import LLMEngine
        from rustvllm.observe.trace.sinks import make_tracer
        from rustvllm.observe.trace.startup_records import note_command_line, note_configuration

        self._args = args
        self._prompt: str = args.positional[-1]
        self._records: list[TraceRecord] = []
        self._num_shown = 0
        engine_args = EngineArgs.from_cli_args(args)
        self._params = self._sampling_params()  # before the model, which takes its time
        config = engine_args.create_engine_config("llm_class")
        config.model.check_task("generate")
        self._adapter = None if args.adapter is None else _adapter_of(config, args.adapter)
        overlap = config.scheduler.async_scheduling
        tracer = make_tracer(
            config.tracing, PROGRAM, owns_file=True, has_overlap=overlap, callback=self._records.append
        )
        note_command_line(tracer, " ".join([PROGRAM, *argv]), began_ns)
        note_configuration(tracer, engine_args, config, began_ns)
        self._engine: LLMEngine = LLMEngine(config, tracer)
        self._page: JourneyPage | None = None
        if not args.json:
            use_color = args.color == "always" or (
                args.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            )
            self._page = JourneyPage(self._engine, print, use_color=use_color)

    def play(self) -> int:
        """Run the requests, one after the other, and show each."""
        startup = list(self._records)
        self._num_shown = len(startup)
        if self._page is not None:
            self._page.show_startup(startup)
        try:
            journeys = [self._ask(index) for index in range(self._args.repeat)]
        finally:
            self._engine.shutdown()
        if self._page is None:
            page = {"startup": [record.as_dict() for record in startup], "requests": journeys}
            print(json.dumps(page, default=str))
        return EXIT_FAILURE if any(journey["error"] for journey in journeys) else EXIT_OK

    def _ask(self, index: int) -> dict[str, Any]:
        from rustvllm.observe.trace.journey import RequestJourney

        request_id, engine = f"request-{index + 1}", self._engine
        first = len(self._records)
        request = engine.input_processor.process(self._prompt, self._params)
        for neighbour in range(self._args.neighbours):
            ids = _rotated(request.prompt_token_ids.tolist(), neighbour + 1)
            engine.add_request(f"neighbour-{index + 1}.{neighbour + 1}", ids, self._params.clone(ignore_eos=True))
        engine.add_request(request_id, request, lora_request=self._adapter)
        if self._page is not None:
            self._page.begin(request_id, self._prompt)
        last: RequestOutput | None = None
        num_steps = 0
        while engine.has_unfinished_requests():
            mine = [output for output in engine.step() if output.request_id == request_id]
            last = mine[-1] if mine else last
            num_steps += self._show_news(request_id)
            if self._args.abort_after is not None and num_steps >= self._args.abort_after:
                engine.abort_request(request_id)
        self._show_news(request_id)
        assert last is not None, "a request gives a last output whatever becomes of it"
        if self._page is not None:
            self._page.end(last)
        [sample] = last.outputs
        return {
            "request_id": request_id,
            "text": sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "num_cached_tokens": last.num_cached_tokens,
            "error": last.error,
            "records": RequestJourney.of(request_id, self._records[first:]).as_json(),
        }

    def _show_news(self, request_id: str) -> int:
        """Show the records since the last time; in how many of their steps the request was."""
        news, self._num_shown = self._records[self._num_shown :], len(self._records)
        if self._page is not None:
            for record in news:
                self._page.show(record)
        return sum(record.event == "scheduled" and record.request_id == request_id for record in news)

    def _sampling_params(self) -> "SamplingParams":
        from rustvllm.sampling_params import SamplingParams

        args = self._args
        return SamplingParams(
            max_tokens=args.max_tokens,
            min_tokens=args.min_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.sampling_seed,
            stop=args.stop,
            ignore_eos=args.ignore_eos,
        )


def _rotated(token_ids: list[int], by: int) -> list[int]:
    """As many tokens in another order, so that no block of theirs is found in the cache."""
    by %= max(1, len(token_ids))
    return [*token_ids[by:], *token_ids[:by]]


def _at_least(least: int, most: int = 2**31 - 1) -> Any:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse
