"""vLLM's flags and engine arguments whose features are not built: refused with a reason, or accepted without effect.

A flag that asks for nothing (with a neutral value, or as ``--no-…``) passes, so only a feature that is really needed
stops a command line or script written for vLLM. A parser's own flags win over these tables.
"""

import argparse
import ast
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rustvllm.exceptions import ConfigError
from rustvllm.redaction import MASK

_MEDIA = (
    "messages hold text and images as data: URLs, which have no settings but --limit-mm-per-prompt and "
    "--mm-processor-kwargs"
)
_ADAPTERS = "adapters (--enable-lora) name their modules in their own files"
_EXPERTS = "ranks share every expert (--tensor-parallel-size) instead of holding some experts each"
_STATES = "rustvllm does not serve state-space models such as Mamba"
_DEVICES = "-tp and -pp split a model across ranks; -dp N starts N engines, each with the whole model"
_HOSTS = (
    "start engines on other machines with --headless --engine-address tcp:HOST:PORT, and name them here with "
    "--engine-address"
)
_KV_ELSEWHERE = "KV blocks stay in their engine; --preemption-mode swap moves those of preempted requests to CPU memory"
_TRANSFER = "engines do not send each other KV blocks, encoder outputs or weights"
_KERNELS = "rustvllm chooses kernels while the model loads; --attention-backend chooses the attention backend"
_OFFLOAD = "rustvllm does not offload weights; --quantization int8 or --dtype bfloat16 makes them smaller"
_DRAFTS = "set speculative decoding with --speculative-config"
_SLEEP = "an engine cannot sleep; stop the server and start it again"
_LOADING = "rustvllm maps safetensors files and reads the weights once, in parallel"
_PROBES = "one launcher starts and watches all processes; GET /health reports their state"
_COMPILED = "rustvllm does not compile models; decode steps run as CUDA graphs (--cudagraph-capture-sizes)"
_STEPS = "rustvllm bench step, --trace and --step-trace-file show where the time of a step goes"

REFUSED_ARGUMENTS: Final[Mapping[str, str]] = {
    # the reason -> the engine arguments (each is also a flag) that it refuses, with the values that ask for nothing
    "this process runs one engine; rustvllm serve -dp N starts N engines": "data_parallel_size=1",
    "the only backend for structured output is built in and has no settings": (
        "structured_outputs_config=None guided_decoding_backend=None,auto"
    ),
    "a prompt must be text or token ids": "enable_prompt_embeds=False",
    'pass it in hf_overrides: {"rope_scaling": ...}': "rope_scaling=None",
    "rustvllm does not offload weights; quantization int8 or dtype bfloat16 makes them smaller": "cpu_offload_gb=0,0.0",
    "KV blocks stay in their engine; preemption_mode swap moves those of preempted requests to CPU memory": (
        "kv_offloading_size=None,0"
    ),
    "use max_num_seqs and max_num_batched_tokens to trade latency for throughput": "performance_mode=None,balanced",
    "tokenizers run in the Rust core, which has one mode": "tokenizer_mode=auto",
    "revision applies to the model and its tokenizer; for another one, set tokenizer to a folder": (
        "tokenizer_revision=None"
    ),
    "revision applies to the model and its code": "code_revision=None",
    "set runner to pooling for embeddings, and convert to classify for classification": "task=auto,generate",
    "rustvllm does not compile models; cudagraph_capture_sizes sets the sizes of CUDA graphs": (
        "compilation_config=None,0,1,2,3"
    ),
    "only the server logs requests, and only with enable_log_requests": "disable_log_requests=True",
    "only the server logs requests; a script knows its own": "enable_log_requests=False",
    "rustvllm cannot turn off a model's sliding window; set max_model_len to at most the window instead": (
        "disable_sliding_window=False"
    ),
}

REFUSED_KEYWORDS: Final[Mapping[str, str]] = {
    # as above, of arguments whose flags the server has itself, or which have no flag
    "set model to the folder, the hub's name or the GGUF file of the weights": "model_weights=",
    "only LLM takes it, for thinking_token_budget, and rustvllm serve as --reasoning-parser": "reasoning_parser=",
    "prompts can only be text": "enable_mm_processor_stats=False",
    "rustvllm does not serve state-space models such as Mamba": "mamba_config=None",
    "RUSTVLLM_LOGGING_CONFIG_PATH names the file of logging": "log_config_file=None",
    "AsyncLLM.shutdown(timeout=...) waits for requests; others end with their outputs": "shutdown_timeout=0",
}

REFUSED: Final[Mapping[str, str]] = {
    # the reason -> the flags that it refuses, each with the values that ask for nothing
    _MEDIA: "--trust-request-mm-kwargs --allowed-local-media-path= --allowed-media-domains --enable-mm-embeds "
    "--media-io-kwargs={} --mm-encoder-only --mm-encoder-attn-backend "
    "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --interleave-mm-strings "
    "--video-pruning-rate=0 --mm-ipc-gpu-memory-gb=0 --mm-processor-device=auto,cpu --mm-device-do-normalize",
    _ADAPTERS: "--fully-sharded-loras --lora-target-modules --default-mm-loras={} --enable-tower-connector-lora "
    "--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras",
    _EXPERTS: "--enable-expert-parallel,-ep --enable-eplb --eplb-config={} --enable-ep-weight-filter "
    "--enable-elastic-ep --elastic-ep-max-dp-size --enable-return-routed-experts",
    _STATES: "--mamba-block-size --mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding "
    "--enable-mamba-shared-prefix-checkpoint --use-replayssm",
    _DEVICES: "--decode-context-parallel-size,-dcp=1 --prefill-context-parallel-size,-pcp=1 --enable-dbo "
    "--ubatch-size=0 --enable-hc-sp --worker-cls=auto --worker-extension-cls= --device-ids "
    "--enable-batch-sharded-sampling --dcp-q-replicate",
    _HOSTS: "--data-parallel-rank,-dpn --data-parallel-start-rank,-dpr=0 "
    "--data-parallel-size-local,-dpl --data-parallel-address,-dpa --data-parallel-rpc-port,-dpp "
    "--data-parallel-backend,-dpb=mp --data-parallel-hybrid-lb,-dph --data-parallel-external-lb,-dpe "
    "--data-parallel-multi-port-external-lb,-dpm --enable-scale-out",
    _KV_ELSEWHERE: "--kv-offloading-backend=native --prefix-cache-retention-interval=0",
    _TRANSFER: "--kv-transfer-config --kv-events-config --ec-transfer-config --ec-manager-config={} "
    "--weight-transfer-config",
    _KERNELS: "--moe-backend=auto --linear-backend=auto --sparse-indexer-topk-backend=auto --kernel-config={} "
    "--attention-config,-ac={} --ir-op-priority={} --gdn-prefill-backend=auto --kda-prefill-backend=auto "
    "--kda-decode-backend=auto --mamba-backend=triton",
    _OFFLOAD: "--offload-backend=auto --offload-group-size=0 --offload-num-in-group=1 --offload-prefetch-step=1 "
    "--offload-params --cpu-offload-params",
    _DRAFTS: "--spec-method --spec-model --spec-tokens --per-request-spec-decode-metrics=none",
    _SLEEP: "--enable-sleep-mode --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names "
    "--enable-cumem-allocator --enable-nccl-comm-suspend",
    _LOADING: "--model-loader-extra-config={} --ignore-patterns --safetensors-load-strategy=lazy",
    _STEPS: "--enable-layerwise-nvtx-tracing --collect-detailed-traces --profiler-config={} --enable-mfu-metrics "
    "--cudagraph-metrics --enable-logging-iteration-details --ray-workers-use-nsight",
    "the server only speaks HTTP": "--grpc --grpc-port",
    "set log levels with --uvicorn-log-level and RUSTVLLM_LOGGING_LEVEL, and all else with --log-config-file": (
        "--log-level --logging-config={}"
    ),
    "system_fingerprint is made from the version, model, revision and dtype": (
        "--fingerprint-mode=full --fingerprint-value"
    ),
    "a request gets its times with `timings` in its body": "--enable-per-request-metrics",
    "prompts are text or token ids, and answers text or embeddings": "--io-processor-plugin",
    "rustvllm reads the quantization from the checkpoint; --quantization int8 quantises other checkpoints": (
        "--quantization-config={} --allow-deprecated-quantization"
    ),
    "config.json names the architecture; --hf-overrides replaces its values": "--model-class-overrides={}",
    "rustvllm reads config.json or a GGUF file": "--config-format=auto,hf",
    "set the hub's token in the environment variable HF_TOKEN": "--hf-token",
    "rustvllm samples in float32": "--use-fp64-gumbel",
    "use --logits-processors, whose classes see the logits of every step": "--return-sampling-mask",
    "use greedy decoding, or a seed in each request, to get the same tokens again": "--enable-trace-replay",
    "only the built-in parsers parse tool calls": ("--tool-parser-plugin= --tool-server --tool-strict-level=auto"),
    "only the built-in parsers parse reasoning": "--reasoning-parser-plugin= --reasoning-config={}",
    "use --skip-tokenizer-init, and send prompts as token ids": "--tokens-only",
    "POST /tokenize and the model's folder describe the tokenizer": "--enable-tokenizer-info-endpoint",
    "--enable-log-outputs only logs whole answers": "--enable-log-deltas",
    "the log always has the tracebacks of unexpected errors, and no others": "--log-error-stack",
    "the server does not have Cohere's API": "--cohere-format=cmd4",
    "the server does not have Anthropic's API": "--anthropic-disabled-thinking-effort=auto",
    "the launcher is one process and needs no port": "--data-parallel-supervisor-port=9256",
    _PROBES: "--dp-supervisor-probe-interval-s=5.0,5 --dp-supervisor-probe-timeout-s=5.0,5 "
    "--dp-supervisor-probe-failure-threshold=3",
    "every layer has its own KV cache": "--kv-sharing-fast-prefill",
    "--kv-cache-dtype applies to all layers": "--kv-cache-dtype-skip-layers",
    "the prefix cache matches whole blocks (--block-size)": "--prefix-match-unit",
    "--max-num-batched-tokens limits the tokens of a step": "--max-num-scheduled-tokens",
    "--max-num-seqs limits the requests of a step": "--max-num-active-seqs",
    "the longest chunk of a prompt is fixed (--long-prefill-token-threshold)": (
        "--long-prefill-token-threshold-adaptive"
    ),
    "the scheduler is compiled Rust; --scheduling-policy chooses its policy": "--scheduler-cls",
    "the scheduler admits prompts in every step": "--prefill-schedule-interval=1",
    "list the sizes with --cudagraph-capture-sizes": "--max-cudagraph-capture-size",
    "rustvllm does not watermark text": "--watermark-config={}",
    "rustvllm does not serve diffusion models": "--diffusion-config,-dc={}",
    "rustvllm does not serve models with an engram memory": "--engram-config={}",
    "rustvllm has no auxiliary outputs": "--aux-output-config={}",
    "rustvllm has no out-of-tree platforms": "--additional-config={}",
    "--restart-engine starts an engine again that died": ("--enable-fault-tolerance --fault-tolerance-config={}"),
    "no metric is hidden; docs/metrics.md lists all of them": "--show-hidden-metrics-for-version",
    "the buckets of histograms are fixed (docs/metrics.md)": "--custom-histogram-buckets={}",
    "vllm:kv_cache_usage_perc counts KV blocks, and the live page maps them": "--kv-cache-metrics",
    "API processes and engines exchange frames over sockets, without shared memory": "--enable-shm-tensor-arena",
}

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    # why they change nothing -> flags, which take any value
    _MEDIA: "--language-model-only --mm-processor-cache-gb --mm-processor-cache-type --mm-hasher-algorithm "
    "--mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-fp8-scale-save-margin --skip-mm-profiling "
    "--video-pruning-method --mm-tensor-ipc --disable-chunked-mm-input",
    _ADAPTERS: "--max-lora-cls-labels",
    _EXPERTS: "--all2all-backend --expert-placement-strategy",
    _STATES: "--mamba-cache-philox-rounds --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-cache-mode "
    "--replayssm-buffer-len",
    _DEVICES: "--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size "
    "--dbo-decode-token-threshold --dbo-prefill-token-threshold --dp-sync-interval "
    "--disable-nccl-for-dp-synchronization --disable-custom-all-reduce "
    "--cpu-distributed-timeout-seconds --max-parallel-loading-workers",
    "bind processes with taskset or numactl; their threads follow": ("--numa-bind --numa-bind-nodes --numa-bind-cpus"),
    _COMPILED: "--optimization-level,-O,-O0,-O1,-O2,-O3 --enable-flashinfer-autotune --jit-monitor-mode "
    "--jit-monitor-verbose",
    _LOADING: "--safetensors-prefetch-num-threads --safetensors-prefetch-block-size --pt-load-map-location",
    "all layers of a model share one pool of KV blocks": "--disable-hybrid-kv-cache-manager --swa-bounded-replay",
    "the scheduler admits a request when its next chunk fits": "--scheduler-reserve-full-isl",
    "separate processes render chat templates": "--renderer-num-workers",
    "rustvllm has no cascade attention": "--disable-cascade-attn",
    "the server does not have Cohere's API": "--cohere-is-reasoning-model",
    "rustvllm has no late interaction": "--enable-flash-late-interaction",
    "rustvllm does not sample KV blocks for metrics": "--kv-cache-metrics-sample",
    "the log has one line per engine": "--aggregate-engine-logging",
    "rustvllm always checks the values of its environment variables": "--fail-on-environ-validation",
    "the page /docs never needs a network": "--enable-offline-docs",
    "a model may call tools if its call format is known; --tool-call-parser none leaves calls as text": (
        "--no-enable-auto-tool-choice"
    ),
    "--enable-access-log turns the access log on": "--no-disable-uvicorn-access-log",
}

ALIASES: Final[Mapping[str, str]] = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "--device-memory-utilization": "--gpu-memory-utilization",
}
"""Other names that vLLM has for flags of rustvllm."""


_METHODS: Final[Mapping[str, str]] = {
    # what works instead, or the reason -> the methods of EngineArgs
    "create_engine_config() makes the whole configuration; its .model is this part": "create_model_config",
    "create_engine_config() makes the whole configuration; its .load is this part": "create_load_config",
    "create_engine_config() makes the whole configuration; its .speculation is this part": "create_speculative_config",
    "create_engine_config() makes the whole configuration; its .scheduler has what structured outputs need": (
        "create_structured_outputs_config"
    ),
    "create_tracing_config() makes the part that says where records of requests go": "create_observability_config",
    "environment variables (RUSTVLLM_LOGGING_LEVEL and others) set up the log": "create_logging_config",
    "create_engine_config() settles max_num_seqs and max_num_batched_tokens": "get_batch_defaults",
    "rustvllm serves no diffusion models": "create_diffusion_config",
    "rustvllm does not watermark outputs": "create_watermark_config",
    _LOADING: "validate_tensorizer_args",
}
METHODS: Final[Mapping[str, str]] = {name: why for why, names in _METHODS.items() for name in names.split()}
"""Why each method of vLLM's ``EngineArgs`` is not there."""


def rows(table: Mapping[str, str]) -> Iterator[tuple[list[str], frozenset[str], str]]:
    """Yield each row: its names, the values that ask for nothing, and the reason."""
    for reason, entries in table.items():
        for word in entries.split():
            names, equals, neutral = word.partition("=")
            yield names.split(","), frozenset(neutral.split(",")) if equals else frozenset(), reason


_ARGUMENTS: Final = {name: (neutral, reason) for [name], neutral, reason in rows(REFUSED_ARGUMENTS)}
_ONLY_KEYWORDS: Final = {name: (neutral, reason) for [name], neutral, reason in rows(REFUSED_KEYWORDS)}


def _keywords(table: Mapping[str, str]) -> Iterator[tuple[str, tuple[frozenset[str], str]]]:
    """The flags of a table as arguments of Python, where a switch that is off is False."""
    for [name, *_], neutral, reason in rows(table):
        if name.startswith("--") and not name.startswith("--no-"):
            yield name.removeprefix("--").replace("-", "_"), (neutral | {"False"}, reason)


_KEYWORDS: Final = {**dict(_keywords(REFUSED)), **_ARGUMENTS, **_ONLY_KEYWORDS}
_IGNORED_KEYWORDS: Final = dict(_keywords(WITHOUT_EFFECT)).keys()


def argument_names() -> Iterable[str]:
    """Engine arguments of vLLM that are not fields of ours."""
    return _KEYWORDS.keys() | _IGNORED_KEYWORDS


def check_argument(name: str, value: Any) -> None:
    """Refuse an engine argument whose feature is not built, unless its value asks for nothing.

    Raises:
        ConfigError: The value asks for the feature; the message names the argument, the value and the reason.
    """
    if name in _IGNORED_KEYWORDS or value is None:
        return
    neutral, reason = _KEYWORDS[name]
    is_choice = any(type(value) is type(choice) and value == choice for choice in map(_value_of, neutral))
    if not is_choice and not _turns_all_off(value):
        raise ConfigError(f"{name}={_shown(name, repr(value))} is not supported yet: {reason}")


def _turns_all_off(value: Any) -> bool:
    """True of settings such as ``{"image": 0}`` and ``{"backend": "auto"}``, each of which asks for nothing."""
    return isinstance(value, Mapping) and all(each in (None, 0, "auto") for each in value.values())


def _value_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # a word, or none
        return text


def _shown(name: str, value: str) -> str:
    """A value for a message; a token of the hub is a secret."""
    return MASK if name.endswith("token") else value


def flag_names(argument: str) -> list[str]:
    """The flags of an engine argument, with ``-`` and with ``_``, which mean the same."""
    flag = "--" + argument.replace("_", "-")
    return [flag, "--" + argument] if "_" in argument else [flag]


def add_refused_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the engine arguments in ``REFUSED_ARGUMENTS``."""
    for name, (neutral, reason) in _ARGUMENTS.items():
        _add(parser, flag_names(name), _Refused, neutral, reason)


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of vLLM that the parser lacks; call this after all other flags were added."""
    taken = parser._option_string_actions  # noqa: SLF001 -- argparse has no public way to ask
    for alias, name in ALIASES.items():
        if alias not in taken and name in taken:
            taken[alias] = taken[name]
    for action in list(parser._actions):  # noqa: SLF001 -- as above
        off = _off(action.option_strings, taken)
        if off and isinstance(action, argparse._StoreTrueAction):  # noqa: SLF001 -- as above
            parser.add_argument(
                *off, dest=action.dest, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
    for names, neutral, reason in rows(REFUSED):
        _add(parser, names, _Refused, neutral, reason)
    for names, _, reason in rows(WITHOUT_EFFECT):
        _add(parser, names, _Ignored, frozenset(), reason)


def _off(flags: Sequence[str], taken: Container[str]) -> list[str]:
    """The ``--no-`` forms that these flags lack."""
    switches = [flag for flag in flags if flag.startswith("--") and not flag.startswith("--no-")]
    return [off for flag in switches if (off := flag.replace("--", "--no-", 1)) not in taken]


def _add(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    kind: type["_FromTable"],
    neutral: frozenset[str],
    reason: str,
) -> None:
    taken = parser._option_string_actions  # noqa: SLF001 -- as above
    off = _off(names, taken)
    hidden: Any = {"dest": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if on := [name for name in names if name not in taken]:
        parser.add_argument(*on, action=kind, nargs="*", neutral=neutral, reason=reason, **hidden)
    if off:
        parser.add_argument(*off, action=_Ignored, nargs=0, neutral=frozenset(), reason=reason, **hidden)


class _FromTable(argparse.Action):
    """An action for the flags of one table row.

    Args:
        neutral: Values that ask for nothing.
        reason: Why the flag is refused or has no effect, and what works instead.
    """

    def __init__(self, *args: Any, neutral: frozenset[str], reason: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.neutral = neutral
        self.reason = reason


class _Ignored(_FromTable):
    def __call__(self, *_: object) -> None:
        return


class _Refused(_FromTable):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 -- argparse's signature
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given, flag = [str(value) for value in values], str(option_string)
        is_off = len(given) == 1 and _turns_all_off(_value_of(given[0]))
        if not is_off and not self.neutral.issuperset(given or ["True"]):  # a bare flag is a switch
            shown = " ".join([flag, *(_shown(flag, value) for value in given)])[:120]
            parser.error(f"{shown} is not supported yet: {self.reason}")
