"""What ``bench throughput`` and ``bench latency`` share: an engine in this process, and prompts."""

import argparse
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rustvllm import _core
from rustvllm.cli.bench.arguments import whole_number
from rustvllm.cli.bench.datasets.known_texts import known_texts
from rustvllm.cli.bench.report.machine import machine, require_release_build, versions
from rustvllm.cli.bench.report.output import check_output
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.config.engine_args import EngineArgs
from rustvllm.config.engine_config import EngineConfig
from rustvllm.exceptions import ConfigError, InvalidRequestError
from rustvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rustvllm.llm import LLM

FIRST_ID = 4
"""Ids below it are often special."""


def make_parser(prog: str, description: str, input_len: int, output_len: int) -> FlexibleArgumentParser:
    """A parser with the lengths of prompts and answers, the report's place and every argument of the engine."""
    parser = FlexibleArgumentParser(prog=prog, usage=f"{prog} [flags]", description=description)
    for flag, default, text in (("--input-len", input_len, "a prompt"), ("--output-len", output_len, "an answer")):
        parser.add_argument(
            flag, type=whole_number(1), default=str(default), metavar="N", help=f"tokens of {text} (default: {default})"
        )
    parser.add_argument(
        "--n",
        type=whole_number(1),
        default="1",
        metavar="N",
        help="answers to each prompt; drawn if several (default: 1)",
    )
    parser.add_argument("--disable-detokenize", action="store_true", help="make no text of the answers' tokens")
    parser.add_argument("--output-json", metavar="FILE", help="also write the report to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    EngineArgs.add_cli_args(parser)
    return parser


def parse(parser: FlexibleArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parsed flags.

    Raises:
        ConfigError: The core is a debug build, or the report's file cannot be written.
    """
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    require_release_build()
    check_output(args.output_json)
    return args


def make_llm(args: argparse.Namespace) -> "LLM":
    """The engine that the flags describe. What its configuration rules out is refused before weights are read.

    Raises:
        ConfigError: A flag is wrong, the engine does not generate text, or prompts and answers do not fit the model.
        ModelLoadError: The model cannot be found or read.
    """
    engine_args = EngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config("llm_class")
    try:
        config.model.check_task("generate")
    except InvalidRequestError as error:
        raise ConfigError(f"this benchmark measures generated text, but {error}") from None
    if getattr(args, "compare", None) == "transformers" and config.sim is not None:
        raise ConfigError("--compare transformers needs a model, but --executor sim has none")
    if getattr(args, "compare", None) == "transformers" and args.n > 1:
        raise ConfigError(f"--compare transformers compares one answer to each prompt, but --n is {args.n}")
    _check_lengths(args, config)
    from rustvllm.llm import LLM

    llm = LLM.from_engine_args(engine_args)
    try:
        _check_lengths(args, llm.llm_engine.config)  # the code of some models takes less than their folder says
    except ConfigError:
        llm.shutdown()
        raise
    return llm


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the prompts are answered with: so many tokens, greedy ones, or drawn ones where answers should differ."""
    return SamplingParams(
        n=args.n,
        temperature=0.0 if args.n == 1 else 1.0,
        max_tokens=args.output_len,
        ignore_eos=True,
        detokenize=not args.disable_detokenize,
    )


def _check_lengths(args: argparse.Namespace, config: EngineConfig) -> None:
    longest = config.model.max_model_len
    if args.input_len + args.output_len > longest:
        raise ConfigError(
            f"--input-len {args.input_len} and --output-len {args.output_len} together exceed the model's {longest} "
            "tokens"
        )


def random_prompts(llm: "LLM", count: int, input_len: int) -> list[Any]:
    """Prompts of random token ids, the same for the same ``--seed``."""
    model = llm.llm_engine.config.model
    source = random.Random(model.seed)
    ids = range(min(FIRST_ID, model.vocab_size - 1), model.vocab_size)
    return [{"prompt_token_ids": source.choices(ids, k=input_len)} for _ in range(count)]


def known_prompts(name: str, llm: "LLM", count: int, input_len: int) -> list[Any]:
    """Prompts of :func:`known_texts`, cut to ``input_len`` tokens, the same for the same ``--seed``.

    Raises:
        ConfigError: The model has no tokenizer, or one that needs fewer tokens for the texts.
    """
    config = llm.llm_engine.config.model
    if llm.llm_engine.tokenizer is None:
        raise ConfigError(f"--dataset-name {name} needs a tokenizer: leave out --skip-tokenizer-init")
    texts = known_texts(name, count, input_len, config.seed)  # a word has a token at least
    token_ids = [llm.get_tokenizer().encode(text)[:input_len] for text in texts]
    if (shortest := min(map(len, token_ids))) < input_len:
        raise ConfigError(f"--dataset-name {name}: a text has {shortest} tokens, but --input-len is {input_len}")
    return [{"prompt_token_ids": ids} for ids in token_ids]


def describe(llm: "LLM", args: argparse.Namespace) -> dict[str, Any]:
    """What a report begins with: machine, versions, model, lengths."""
    config = llm.llm_engine.config
    return {
        "machine": machine(),
        "versions": versions(),
        "build_profile": _core.build_profile,
        "model_id": config.model.served_model_name[0],
        "executor": "sim" if config.sim is not None else "uniproc",
        "device": config.device.device,
        "dtype": config.model.dtype,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "n": args.n,
        "max_num_seqs": config.scheduler.max_num_seqs,
    }
