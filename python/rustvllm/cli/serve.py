"""``rustvllm serve [MODEL]``: engine and front-end flags, then the HTTP server."""

import argparse
from collections.abc import Sequence

from rustvllm.cli.config_file import FLAG, expand_config
from rustvllm.cli.grouped_help import GroupedHelp
from rustvllm.cli.parser import FlexibleArgumentParser, with_dashes
from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.exceptions import ConfigError, RustVLLMError
from rustvllm.logger import redact
from rustvllm.server.flags.serve_args import add_cli_args, add_unsupported_args
from rustvllm.server.launch import console


def make_parser() -> FlexibleArgumentParser:
    """The parser of ``rustvllm serve``."""
    parser = FlexibleArgumentParser(
        prog="rustvllm serve",
        usage="rustvllm serve [MODEL] [flags]",
        description="Serve a model behind an OpenAI-compatible HTTP server.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=GroupedHelp)
    parser.add_argument(
        FLAG, metavar="FILE", help="YAML file with flags as keys; flags on the command line take precedence"
    )
    parser.add_argument(
        "model_tag",
        metavar="MODEL",
        nargs="?",
        help="a folder, or a hub name such as gpt2 (default: the model inside the package)",
    )
    # Each leaves out what is there already.
    add_cli_args(parser)
    AsyncEngineArgs.add_cli_args(parser)
    add_unsupported_args(parser)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; the positional MODEL wins over ``--model``, with a warning.

    Ends the process with exit code 2 when they are wrong.
    """
    parser = make_parser()
    try:
        words = expand_config(parser, [with_dashes(word) for word in argv])
    except ConfigError as error:
        parser.error(redact(str(error)))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.refuse_unknown(unknown)
    if args.model_tag is not None:
        flag = getattr(args, "model", None)
        if flag is not None and flag != args.model_tag:
            console.warn(f"serving {args.model_tag}, given by position; --model {flag} is ignored")
        args.model = args.model_tag
    return args


def serve(argv: Sequence[str]) -> int:
    """Run ``rustvllm serve``.

    Returns:
        The exit code: 0 after a stop, 1 after a failure, whose message was printed.
    """
    try:
        args = parse_args(argv)
        from rustvllm.server.launch.serve import run_server

        return run_server(args)
    except RustVLLMError as error:
        console.complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 0
