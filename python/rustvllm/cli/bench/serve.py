"""``rustvllm bench serve``: sends requests to an OpenAI-compatible server and times their streams.

The load is made and the streams are read in Rust; what is here are the flags, the data sets that need a tokenizer, and
the report.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from rustvllm import _core
from rustvllm.cli.api_client import ApiClient
from rustvllm.cli.bench.arguments import number_of, seconds, whole_number
from rustvllm.cli.bench.datasets.known_texts import DRAFT_DATASETS, known_texts
from rustvllm.cli.bench.datasets.lengths import (
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    DEFAULT_PREFIX_LEN,
    choose_lengths,
    default_prefix_len,
)
from rustvllm.cli.bench.datasets.sharegpt import read_sharegpt
from rustvllm.cli.bench.report.machine import require_release_build
from rustvllm.cli.bench.report.output import check_output, publish
from rustvllm.cli.bench.report.progress import LoadProgress
from rustvllm.cli.bench.report.results_file import ResultsFile
from rustvllm.cli.bench.report.serve import METRICS, build_report, is_own_key, summary
from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.exceptions import ConfigError, RequestFailedError

PROGRAM: Final = "rustvllm bench serve"
ENDPOINTS: Final = {
    "vllm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""The endpoint of each ``--backend``, under vLLM's names."""
CHAT: Final = "/chat/completions"
DATASETS: Final = ("random", "prefix", *DRAFT_DATASETS, "sharegpt", "trace")
API_KEY_VARIABLES: Final = ("RUSTVLLM_API_KEY", "OPENAI_API_KEY")
"""Where the server's key is looked for, in this order; never on the command line, which other users can read."""
_TOKENS_PER_KNOWN_WORD: Final = 2
"""Of the texts of ``repeat`` and ``edit``, in most vocabularies."""
DEFAULT_VOCAB_SIZE: Final = 256
"""Every model has that many token ids."""


def make_parser() -> FlexibleArgumentParser:
    """The parser of ``rustvllm bench serve``."""
    parser = FlexibleArgumentParser(
        prog=PROGRAM,
        description="Send requests to an OpenAI-compatible server, this one or another, and time their streams. "
        f"An API key is taken from ${' or $'.join(API_KEY_VARIABLES)}.",
    )
    _add_server_args(parser.add_argument_group("server"))
    _add_load_args(parser.add_argument_group("load"))
    _add_data_args(parser.add_argument_group("data set"))
    _add_request_args(parser.add_argument_group("requests"))
    _add_report_args(parser.add_argument_group("report"))
    return parser


def _add_server_args(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say where the server is, and what is asked of it."""
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="http://HOST:PORT, with or without /v1; takes precedence over --host and --port",
    )
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=whole_number(1, 65535), default="8000", metavar="N", help="(default: 8000)")
    group.add_argument(
        "--backend",
        type=_backend,
        metavar="{" + ",".join(ENDPOINTS) + "}",
        help="vllm and openai: completions; openai-chat: chats (default: as --endpoint says, else openai)",
    )
    group.add_argument(
        "--endpoint",
        type=_endpoint,
        metavar="PATH",
        help=f"ends in /completions or {CHAT} (default: {ENDPOINTS['openai']}; with openai-chat "
        f"{ENDPOINTS['openai-chat']})",
    )
    group.add_argument("--model", help="name to ask for (default: the first of /v1/models)")


def _add_load_args(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say how many requests come, and when."""
    group.add_argument(
        "--num-prompts", type=whole_number(1), default="1000", metavar="N", help="requests (default: 1000)"
    )
    group.add_argument(
        "--request-rate",
        type=number_of(
            "a number above 0 and at most 1000000, or inf", lambda number: 0 < number <= 1e6 or number == math.inf
        ),
        default=math.inf,
        metavar="R",
        help="requests per second (default: inf, at once)",
    )
    group.add_argument(
        "--burstiness",
        type=number_of("a number above 0 and at most 1000", lambda number: 0 < number <= 1000),
        default=1.0,
        metavar="B",
        help="shape of the gaps between requests: 1 is a Poisson process, less is burstier (default: 1)",
    )
    group.add_argument("--max-concurrency", type=whole_number(1), metavar="N", help="most requests open at a time")
    group.add_argument(
        "--warmup",
        "--num-warmups",
        type=whole_number(0),
        default="0",
        metavar="N",
        help="requests sent first, without being measured",
    )
    group.add_argument(
        "--seed", type=whole_number(0), default="0", metavar="N", help="seed of arrivals and prompts (default: 0)"
    )
    group.add_argument(
        "--request-timeout",
        type=seconds,
        default=3600.0,
        metavar="S",
        help="longest time of a request in seconds (default: 3600)",
    )


def _add_data_args(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say what the requests hold."""
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default=DATASETS[0],
        help="repeat and edit: texts whose answers speculative decoding can predict (default: %(default)s)",
    )
    group.add_argument(
        "--dataset-path", metavar="FILE", help="file of the data set sharegpt (JSON) or trace (Mooncake's or Azure's)"
    )
    lengths = (
        ("--random-input-len", "--input-len", "prompt", DEFAULT_INPUT_LEN),
        ("--random-output-len", "--output-len", "answer", DEFAULT_OUTPUT_LEN),
    )
    for flag, other, what, default in lengths:
        group.add_argument(
            flag,
            other,
            type=whole_number(1),
            metavar="N",
            help=f"tokens of each {what}; approximate with repeat and edit (default: {default}; fewer if the "
            "context is shorter)",
        )
    group.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        type=whole_number(0),
        default="0",
        metavar="N",
        help="tokens of the prefix that prompts share (default: 0; with prefix 256, fewer if the context is shorter)",
    )
    group.add_argument(
        "--num-prefixes",
        type=whole_number(1),
        metavar="N",
        help="number of different prefixes (default: 1; with prefix: 10)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=number_of("a number of at least 0 and below 1", lambda number: 0 <= number < 1),
        default=0.0,
        metavar="R",
        help="fraction by which lengths vary, up and down (default: 0)",
    )
    group.add_argument(
        "--vocab-size",
        type=whole_number(0),
        default=str(DEFAULT_VOCAB_SIZE),
        metavar="N",
        help="prompts are token ids below this; 0: plain words, which chats always use (default: %(default)s)",
    )
    group.add_argument(
        "--sharegpt-output-len", type=whole_number(1), metavar="N", help="tokens of every answer, with sharegpt"
    )
    group.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="tokenizer that counts the answers of sharegpt, without --sharegpt-output-len",
    )


def _add_request_args(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say how answers are sampled."""
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="continue past the end of sequence, so that answers have the requested length",
    )
    group.add_argument(
        "--temperature",
        type=number_of("a number of at least 0", lambda number: 0 <= number < math.inf),
        default=0.0,
        metavar="T",
        help="(default: 0, greedy)",
    )
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="further fields of each request"
    )


def _add_report_args(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say what is reported, and where."""
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=",".join(METRICS),
        metavar="M,M,...",
        help="metrics that the table shows (default: %(default)s)",
    )
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default="99", metavar="P,P,...", help="(default: %(default)s)"
    )
    group.add_argument(
        "--goodput",
        type=_goodput,
        nargs="+",
        default=[],
        metavar="M:MS",
        help="limits of a good request in milliseconds, for instance ttft:200,tpot:30,e2el:5000",
    )
    group.add_argument("--output-json", metavar="FILE", help="also write the report to this file")
    group.add_argument("--save-result", action="store_true", help="save the report in a new file, as one line of JSON")
    group.add_argument("--append-result", action="store_true", help="the same, after what is in the file")
    group.add_argument(
        "--result-dir", metavar="FOLDER", help="folder of that file; made if it is missing (default: the present one)"
    )
    group.add_argument(
        "--result-filename",
        metavar="FILE",
        help="its name (default: LABEL-RATEqps[-concurrencyN]-MODEL-DATE.json)",
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="put the times and tokens of each request into the report"
    )
    group.add_argument("--label", metavar="TEXT", help="begins the name of the file (default: --backend)")
    group.add_argument(
        "--metadata",
        type=_metadata,
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="goes into the report, for instance version=1.2 tp=2",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def bench_serve(argv: Sequence[str]) -> int:
    """Run ``rustvllm bench serve``.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: The core is a debug build, or arguments contradict each other.
        ConnectionError: There is no server, or it does not say what it serves.
        RequestFailedError: No request came to its end.
        TraceError: The trace cannot be read.
        ValueError: A number is outside its limits.
    """
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse_unknown(unknown)
    require_release_build()
    _check_data_set(args)
    _choose_endpoint(args)
    _check_metadata(args)
    host = f"[{args.host}]" if ":" in args.host else args.host
    base_url = _without_version(args.base_url) or f"http://{host}:{args.port}"
    api_key = next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), None)
    check_output(args.output_json)
    _allow_many_connections()
    model = args.model or _core.served_model(base_url, api_key=api_key)
    date = time.strftime("%Y%m%d-%H%M%S")
    results = ResultsFile(args, model, date) if args.save_result or args.append_result else None
    if results is not None:
        results.check()
    _note_what_has_no_effect(args)
    options = _data_set(args, base_url, model, api_key)
    if args.save_detailed:
        options["detailed"] = True
    fields = {
        "model": model,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if args.ignore_eos else {}),
        **args.extra_body,
    }
    goodput = {name: limit for part in args.goodput for name, limit in part.items()}
    with LoadProgress(args.num_prompts, enabled=not args.disable_tqdm) as progress:
        measured = _core.bench_serve(
            base_url,
            args.endpoint,
            json.dumps(fields),
            num_prompts=args.num_prompts,
            request_rate=args.request_rate if math.isfinite(args.request_rate) else None,
            burstiness=args.burstiness,
            as_recorded=args.dataset_name == "trace" and not math.isfinite(args.request_rate),
            max_concurrency=args.max_concurrency,
            num_warmups=args.warmup,
            seed=args.seed,
            timeout_s=args.request_timeout,
            percentiles=args.metric_percentiles,
            **{f"goodput_{name}_ms": limit for name, limit in goodput.items()},
            api_key=api_key,
            progress=progress,
            **options,
        )
        progress.finish(measured)
    report = build_report(args, base_url, model, date, goodput, measured)
    publish(args, report, summary(report, args.percentile_metrics, args.metric_percentiles))
    if not report["completed"]:
        kind, example = next(iter(report["error_examples"].items()))
        unsaved = "" if results is None else f" ({results.path} was not written)"
        raise RequestFailedError(f"none of {report['failed']} requests finished; first {kind}: {example}{unsaved}")
    if results is not None:
        results.write(report)
        _note(f"saved in {results.path}")
    return 0


def _choose_endpoint(args: argparse.Namespace) -> None:
    """Let what is given of ``--backend`` and ``--endpoint`` decide on the other.

    Raises:
        ConfigError: They contradict each other.
    """
    if args.backend is None:
        args.backend = "openai-chat" if args.endpoint is not None and args.endpoint.endswith(CHAT) else "openai"
    if args.endpoint is None:
        args.endpoint = ENDPOINTS[args.backend]
    is_chat = args.backend == "openai-chat"
    if is_chat != args.endpoint.endswith(CHAT):
        wanted = f"ends in {CHAT}" if is_chat else f"ends in /completions, and not in {CHAT}"
        raise ConfigError(
            f"--backend {args.backend} needs an --endpoint that {wanted}, for instance {ENDPOINTS[args.backend]}; got "
            f"{args.endpoint}"
        )


def _check_metadata(args: argparse.Namespace) -> None:
    """Refuse keys that hide a value of the report, or each other.

    Raises:
        ConfigError: Names the key.
    """
    keys = [key for key, _ in args.metadata]
    for key in keys:
        if is_own_key(key):
            raise ConfigError(f"--metadata {key}: the report has a {key} of its own; choose another key")
        if keys.count(key) > 1:
            raise ConfigError(f"--metadata {key} is given {keys.count(key)} times; each key may be given once")


def _note_what_has_no_effect(args: argparse.Namespace) -> None:
    is_saved = args.save_result or args.append_result
    is_shown = is_saved or args.json or args.output_json is not None
    without_file = {"--result-dir": args.result_dir, "--result-filename": args.result_filename, "--label": args.label}
    without_report = {"--metadata": args.metadata, "--save-detailed": args.save_detailed}
    for flag, given in without_file.items():
        if given and not is_saved:
            _note(f"{flag} has no effect without --save-result or --append-result")
    for flag, given in without_report.items():
        if given and not is_shown:
            _note(f"{flag} has no effect without --save-result, --append-result, --output-json or --json")


def _check_data_set(args: argparse.Namespace) -> None:
    if args.dataset_name in ("sharegpt", "trace") and args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")


def _data_set(args: argparse.Namespace, base_url: str, model: str, api_key: str | None) -> dict[str, Any]:
    """The core's arguments for the prompts."""
    is_chat = args.endpoint.endswith(CHAT)
    vocab_size = None if is_chat or args.vocab_size == 0 else args.vocab_size
    name = args.dataset_name
    if name in ("random", "prefix"):
        is_prefix = name == "prefix"
        context_len = ApiClient(base_url, api_key, model).context_len()
        prefix_len = args.prefix_len
        if is_prefix and not prefix_len:
            prefix_len = default_prefix_len(context_len, is_text=vocab_size is None)
            if prefix_len < DEFAULT_PREFIX_LEN:
                unit = "words" if vocab_size is None else "tokens"
                _note(f"prefixes have {prefix_len} {unit} instead of {DEFAULT_PREFIX_LEN}: the context is short")
        lengths = choose_lengths(
            args.random_input_len,
            args.random_output_len,
            prefix_len=prefix_len,
            range_ratio=args.random_range_ratio,
            is_text=vocab_size is None,
            context_len=context_len,
        )
        if lengths.note:
            _note(lengths.note)
        return {
            "vocab_size": vocab_size,
            "random": {
                "input_len": lengths.input_len,
                "output_len": lengths.output_len,
                "range_ratio": args.random_range_ratio,
                "prefix_len": prefix_len,
                "num_prefixes": args.num_prefixes or (10 if is_prefix else 1),
            },
        }
    if name in DRAFT_DATASETS:
        given = args.random_input_len
        lengths = choose_lengths(
            None if given is None else max(1, given // _TOKENS_PER_KNOWN_WORD),
            args.random_output_len,
            prefix_len=0,
            range_ratio=0.0,
            is_text=True,
            context_len=ApiClient(base_url, api_key, model).context_len(),
            default_input_len=DEFAULT_INPUT_LEN // _TOKENS_PER_KNOWN_WORD,
        )
        if lengths.note:
            _note(lengths.note)
        shown = known_texts(name, args.num_prompts, lengths.input_len, args.seed)
        return {"texts": [(text, lengths.output_len) for text in shown]}
    if name == "trace":
        return {"vocab_size": vocab_size, "trace": args.dataset_path}
    texts = read_sharegpt(args.dataset_path, args.num_prompts, args.seed, args.sharegpt_output_len, args.tokenizer)
    return {"texts": texts}


def _without_version(base_url: str | None) -> str | None:
    """The base URL as this command takes it: other clients want it with ``/v1``, which ``--endpoint`` has already."""
    return None if base_url is None else base_url.rstrip("/").removesuffix("/v1")


def _note(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one: each open request has a connection."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            print(f"rustvllm bench serve: the limit of open files stays {soft}: {error}", file=sys.stderr)


def _backend(text: str) -> str:
    if text not in ENDPOINTS:
        raise argparse.ArgumentTypeError(
            f"must be {', '.join(ENDPOINTS)} (only streams of generated text are measured), got {text!r:.80}"
        )
    return text


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"/([A-Za-z0-9._~%-]+/)*completions", text):
        raise argparse.ArgumentTypeError(
            f"must be a path that ends in /completions or {CHAT}, for instance {ENDPOINTS['openai']}, got {text!r:.200}"
        )
    return text


def _metadata(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, for instance version=1.2, got {text!r:.200}")
    return key.strip(), value.strip()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r:.200}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(METRICS):
        raise argparse.ArgumentTypeError(
            f"must be one or more of {', '.join(METRICS)}, separated by commas, got {text!r}"
        )
    return names


def _percentiles(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 100, separated by commas, got {text!r}")
    return numbers


def _goodput(text: str) -> dict[str, float]:
    limits = {}
    for part in text.split(","):
        name, _, number = part.partition(":")
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not 0 < limits[name] < math.inf:
            raise argparse.ArgumentTypeError(f"must be like ttft:200,tpot:30,e2el:5000 (milliseconds), got {text!r}")
    return limits
