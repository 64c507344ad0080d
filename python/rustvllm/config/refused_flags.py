"""Flags and engine arguments that are known and not built: each is refused with its reason, or taken without effect.

One that asks for nothing (its neutral value, or ``--no-…``) passes, so a command line or script of vLLM is stopped by
what it really needs. Flags that a parser has already win over these tables.
"""

import argparse
import ast
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rustvllm.exceptions import ConfigError
from rustvllm.redaction import MASK

_MEDIA = "messages hold text alone: images, audio and video are not served"
_ADAPTERS = "adapters (--enable-lora) take their modules and dtypes from their own files"
_EXPERTS = "models with a mixture of experts are not served"
_STATES = "state-space models (Mamba and the like) are not served"
_DEVICES = "-tp and -pp divide a model among ranks; -dp N starts N engines with the whole model each"
_HOSTS = (
    "engines of other machines are started there with --headless --engine-address tcp:HOST:PORT and named here with "
    "--engine-address"
)
_KV_ELSEWHERE = "KV blocks stay with their engine; --preemption-mode swap moves them to CPU memory"
_TRANSFER = "engines do not transfer KV blocks or encoder outputs to each other"
_KERNELS = "kernels are measured while the model loads; --attention-backend chooses the one of attention"
_OFFLOAD = "weights are not offloaded; --quantization int8 or --dtype bfloat16 makes them smaller"
_DRAFTS = "drafts (speculative decoding) are set by --speculative-config alone"
_SLEEP = "an engine does not sleep; end the server and start it again"
_LOADING = "weights are mapped from safetensors and read once, in parallel"
_PROBES = "one launcher starts and watches all processes; /health reports their state"
_COMPILED = "models run as they are written, and decode steps as CUDA graphs (--cudagraph-capture-sizes)"
_STEPS = "rustvllm bench step, --trace and --step-trace-file show what a step spends its time on"

_ONE_TASK = "only text is generated"

REFUSED_ARGUMENTS: Final[Mapping[str, str]] = {
    # the reason -> its engine arguments, which are flags as well, each with the values that ask for nothing
    "one engine runs in this process; rustvllm serve -dp N starts N": "data_parallel_size=1",
    "one backend enforces structured output, and needs no settings": (
        "structured_outputs_config=None guided_decoding_backend=None,auto"
    ),
    "prompts are texts or token ids": "enable_prompt_embeds=False",
    'hf_overrides takes it: {"rope_scaling": ...}': "rope_scaling=None",
    "weights are not offloaded; quantization int8 or dtype bfloat16 makes them smaller": "cpu_offload_gb=0,0.0",
    "KV blocks stay with their engine; preemption_mode swap moves them to CPU memory": "kv_offloading_size=None,0",
    "a stream sends each token; those that a slow client has not read yet are joined": "stream_interval=1",
    "max_num_seqs and max_num_batched_tokens choose between latency and throughput": "performance_mode=None,balanced",
    "tokenizers run in the Rust core, in one mode": "tokenizer_mode=auto",
    "name a folder as the tokenizer, or one revision for model and tokenizer": "tokenizer_revision=None",
    "one revision holds for the model and its code": "code_revision=None",
    _ONE_TASK: "runner=auto,generate task=auto,generate",
    "messages hold text alone": "limit_mm_per_prompt=None",
    "models run as they are written; cudagraph_capture_sizes names the sizes of CUDA graphs": (
        "compilation_config=None,0,1,2,3"
    ),
    "requests are logged with enable_log_requests alone, which the server has": "disable_log_requests=True",
    "the server has it; a script sees its requests itself": "enable_log_requests=False",
    "a model's sliding window is part of it; a lower max_model_len keeps within it": "disable_sliding_window=False",
}

REFUSED: Final[Mapping[str, str]] = {
    # the reason -> its flags, each with the values that ask for nothing
    _MEDIA: "--trust-request-mm-kwargs --allowed-local-media-path= --allowed-media-domains --enable-mm-embeds "
    "--media-io-kwargs={} --mm-processor-kwargs={} --mm-encoder-only --mm-encoder-attn-backend "
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
    "HTTP is the only protocol served": "--grpc --grpc-port",
    "log levels are set by --uvicorn-log-level and RUSTVLLM_LOGGING_LEVEL, all else by --log-config-file": (
        "--log-level --logging-config={}"
    ),
    "an answer's fingerprint is made of version, model and dtype": "--fingerprint-mode=full --fingerprint-value",
    "times of a request come with `timings` in its body": "--enable-per-request-metrics",
    "only text is generated: there is no pooling, scoring or embedding": (
        "--convert=auto,none --pooler-config --io-processor-plugin"
    ),
    "a checkpoint says its quantization itself, and --quantization int8 quantises others": (
        "--quantization-config={} --allow-deprecated-quantization"
    ),
    "architectures are found by config.json; --hf-overrides replaces its values": "--model-class-overrides={}",
    "a config.json or a GGUF file is read": "--config-format=auto,hf",
    "the token of the hub is taken from HF_TOKEN": "--hf-token",
    "the draw is made in float32": "--use-fp64-gumbel",
    "--logits-processors names classes that see every step's logits": "--return-sampling-mask",
    "greedy decoding, or a seed in each request, repeats tokens": "--enable-trace-replay",
    "tool calls are parsed by the parsers that are built in": (
        "--tool-parser-plugin= --tool-server --tool-strict-level=auto"
    ),
    "reasoning is parsed by the parsers that are built in": "--reasoning-parser-plugin= --reasoning-config={}",
    "give token ids as prompts; --skip-tokenizer-init leaves the tokenizer out": "--tokens-only",
    "POST /tokenize and the model's folder say what its tokenizer is": "--enable-tokenizer-info-endpoint",
    "--enable-log-outputs logs whole answers": "--enable-log-deltas",
    "tracebacks of unforeseen errors are always in the log, and no other is": "--log-error-stack",
    "the API of Cohere is not served": "--cohere-format=cmd4",
    "the API of Anthropic is not served": "--anthropic-disabled-thinking-effort=auto",
    "one launcher process needs no port": "--data-parallel-supervisor-port=9256",
    _PROBES: "--dp-supervisor-probe-interval-s=5.0,5 --dp-supervisor-probe-timeout-s=5.0,5 "
    "--dp-supervisor-probe-failure-threshold=3",
    "every layer keeps its KV cache": "--kv-sharing-fast-prefill",
    "one type holds for the KV cache of all layers (--kv-cache-dtype)": "--kv-cache-dtype-skip-layers",
    "prefixes match in whole blocks (--block-size)": "--prefix-match-unit",
    "tokens of a step are limited by --max-num-batched-tokens": "--max-num-scheduled-tokens",
    "requests of a step are limited by --max-num-seqs": "--max-num-active-seqs",
    "the longest chunk of a prompt is a fixed number (--long-prefill-token-threshold)": (
        "--long-prefill-token-threshold-adaptive"
    ),
    "the scheduler is compiled; --scheduling-policy chooses among its orders": "--scheduler-cls",
    "prompts are admitted in every step": "--prefill-schedule-interval=1",
    "--cudagraph-capture-sizes names the sizes themselves": "--max-cudagraph-capture-size",
    "texts are not watermarked": "--watermark-config={}",
    "diffusion models are not served": "--diffusion-config,-dc={}",
    "models with an engram memory are not served": "--engram-config={}",
    "there is no such output": "--aux-output-config={}",
    "out-of-tree platforms are not served": "--additional-config={}",
    "an engine that died is started again by --restart-engine": (
        "--enable-fault-tolerance --fault-tolerance-config={}"
    ),
    "every metric has its one name, listed in docs/metrics.md": "--show-hidden-metrics-for-version",
    "buckets of histograms are fixed (docs/metrics.md)": "--custom-histogram-buckets={}",
    "KV blocks are counted as vllm:kv_cache_usage_perc; the live page maps them": "--kv-cache-metrics",
    "shared memory is not used between processes: frames go over Unix sockets": "--enable-shm-tensor-arena",
}

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    # why nothing follows from them -> flags, which take any value
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
    "processes are bound by taskset or numactl, and threads follow that": (
        "--numa-bind --numa-bind-nodes --numa-bind-cpus"
    ),
    _COMPILED: "--optimization-level,-O,-O0,-O1,-O2,-O3 --enable-flashinfer-autotune --jit-monitor-mode "
    "--jit-monitor-verbose",
    _LOADING: "--safetensors-prefetch-num-threads --safetensors-prefetch-block-size --pt-load-map-location",
    "a model's layers share one pool of KV blocks": "--disable-hybrid-kv-cache-manager --swa-bounded-replay",
    "a request is admitted when its next chunk fits": "--scheduler-reserve-full-isl",
    "conversations are rendered in processes of their own": "--renderer-num-workers",
    "cascade attention is not built": "--disable-cascade-attn",
    "the API of Cohere is not served": "--cohere-is-reasoning-model",
    "there is no late interaction": "--enable-flash-late-interaction",
    "KV blocks are not sampled for metrics": "--kv-cache-metrics-sample",
    "the log has a line for each engine": "--aggregate-engine-logging",
    "environment variables are always checked": "--fail-on-environ-validation",
    "/docs never needs a network": "--enable-offline-docs",
    "a model may call tools if the format of its calls is known; --tool-call-parser none leaves them text": (
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
"""vLLM's other names of flags that are known here."""


def rows(table: Mapping[str, str]) -> Iterator[tuple[list[str], frozenset[str], str]]:
    """The names of each row, the values that ask for nothing, and the reason."""
    for reason, entries in table.items():
        for word in entries.split():
            names, equals, neutral = word.partition("=")
            yield names.split(","), frozenset(neutral.split(",")) if equals else frozenset(), reason


_ARGUMENTS: Final = {name: (neutral, reason) for [name], neutral, reason in rows(REFUSED_ARGUMENTS)}


def _keywords(table: Mapping[str, str]) -> Iterator[tuple[str, tuple[frozenset[str], str]]]:
    """The flags of a table as arguments of Python, where a switch that is off is False."""
    for [name, *_], neutral, reason in rows(table):
        if name.startswith("--") and not name.startswith("--no-"):
            yield name.removeprefix("--").replace("-", "_"), (neutral | {"False"}, reason)


_KEYWORDS: Final = {**dict(_keywords(REFUSED)), **_ARGUMENTS}
_IGNORED_KEYWORDS: Final = dict(_keywords(WITHOUT_EFFECT)).keys()


def argument_names() -> Iterable[str]:
    """Engine arguments of vLLM that are not fields of ours."""
    return _KEYWORDS.keys() | _IGNORED_KEYWORDS


def check_argument(name: str, value: Any) -> None:
    """Refuse an engine argument of a feature to come, unless its value asks for nothing.

    Raises:
        ConfigError: Names argument and value.
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
    """The flags of an engine argument: ``-`` and ``_`` mean the same."""
    flag = "--" + argument.replace("_", "-")
    return [flag, "--" + argument] if "_" in argument else [flag]


def add_refused_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of engine arguments of features to come."""
    for name, (neutral, reason) in _ARGUMENTS.items():
        _add(parser, flag_names(name), _Refused, neutral, reason)


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add what of vLLM's command line no flag of the parser takes; the last to be added."""
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
    """The ``--no-`` forms of flags that have none."""
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
    """A row of a table.

    Args:
        neutral: Values that ask for nothing.
        reason: Why it does not work, and what does.
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
