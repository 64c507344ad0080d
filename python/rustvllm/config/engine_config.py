"""The engine's configuration: frozen parts in one frozen :class:`EngineConfig`, checked where they are built.

Plain data without torch: it is made in a process that serves HTTP and read in one that computes. Each part refuses
values out of range; rules that concern two parts are in ``EngineConfig.__post_init__``. Defaults that depend on the
machine or on the use are decided in ``engine_args``, never here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rustvllm.config import attention_backends
from rustvllm.config.attention_backends import ATTENTION_BACKENDS
from rustvllm.config.lora import LoRAConfig, check_adapters, check_merging
from rustvllm.config.parallel import ParallelConfig, check_split, check_stages
from rustvllm.config.quantized_folders import FOLDER_METHODS, SAME_METHODS
from rustvllm.config.speculation import SpeculationConfig, check_draft_model
from rustvllm.exceptions import ConfigError, InvalidRequestError

DTYPES = ("float32", "float16", "bfloat16")
"""Names of the tensor types a model can compute in."""
DEVICES = ("cpu", "cuda")
MOST_CPU_THREADS = 1024
"""As many as the core starts."""
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
"""What the KV cache holds: numbers of the model's dtype, or of eight bits (both names are e4m3)."""
MAX_SWAP_SPACE = 1 << 20
"""GiB: more than any machine has, and few enough for a size in bytes to be exact."""
STORED_QUANTIZATIONS = ("gguf", *FOLDER_METHODS, *SAME_METHODS)
"""What a checkpoint is in any case: named, it is compared with what is there."""
QUANTIZATIONS = (
    "int8", "int8-g32", "int8-g64", "int8-g128", "int4-g32", "int4-g64", "int4-g128", *STORED_QUANTIZATIONS,
)  # fmt: skip
"""Weights of one byte: with a scale for each output of a layer, or for each output and group of so many inputs; gguf:
as a GGUF file has them."""
LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLS = ("auto", "rustvllm", "transformers")
SCHEDULING_POLICIES = ("fcfs", "priority", "fair")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
"""Raw: as the model gave them. Processed: after penalties, masks, temperature and truncation, as they are drawn
from."""
LARGEST_MAX_LOGPROBS = 500_000
"""So many candidates of one place fit into a frame between processes."""
CAPTURE_MODES = ("ahead", "lazy")
EXECUTORS = ("auto", "uniproc", "sim")
MAX_SIM_MS = 60_000.0
"""A term of a simulated step's time at most."""
PreemptionMode = Literal["recompute", "swap"]
"""What happens to a preempted request's KV: it is computed again, or its blocks move to CPU memory."""
PREEMPTION_MODES: tuple[PreemptionMode, ...] = ("recompute", "swap")


HashAlgorithm = Literal["siphash13", "sha256"]
"""What the core can name a cached block by: 128 bits of a function with a secret key of the process."""
PREFIX_CACHING_HASH_ALGOS: Mapping[str, HashAlgorithm] = MappingProxyType(
    {
        "builtin": "siphash13",
        "sha256": "sha256",
        "sha256_cbor": "sha256",  # the names with _cbor differ in how vLLM writes down what is hashed
        # xxHash has no secret: a client that guesses its seed can make two prompts collide and get another's blocks.
        "xxhash": "siphash13",
        "xxhash_cbor": "siphash13",
    }
)
"""Names that vLLM has, and what runs for each."""


def require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse ``value`` unless it is an int (not a bool) in ``[low, high]``.

    Raises:
        ConfigError: Names the argument, the value and the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise ConfigError(f"{name} must be at most {high}, got {value}")


def require_fraction(name: str, value: object) -> None:
    """Refuse ``value`` unless it is a number in ``(0, 1]``.

    Raises:
        ConfigError: Names the argument, the value and the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not (math.isfinite(value) and 0.0 < value <= 1.0):
        raise ConfigError(f"{name} must be greater than 0 and at most 1, got {value}")


def require_number(name: str, value: object, low: float, below: float) -> None:
    """Refuse ``value`` unless it is a number in ``[low, below)``.

    Raises:
        ConfigError: Names the argument, the value and the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not low <= value < below:  # not a number is nowhere
        raise ConfigError(f"{name} must be at least {low:g} and less than {below:g}, got {value}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse ``value`` unless it is one of ``choices``.

    Raises:
        ConfigError: Names the argument, the value and what is allowed.
    """
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is known of a model from its folder, without reading a weight.

    Attributes:
        model: The name it was asked for by.
        path: Folder with ``config.json`` and the weights, or a GGUF file.
        revision: Branch, tag or commit on the hub.
        tokenizer: Name of the tokenizer when it was given apart from the model.
        tokenizer_path: Folder with ``tokenizer.json``, or a GGUF file; None with ``skip_tokenizer_init``.
        hf_config: ``config.json`` as it is.
        architecture: Model class, for instance ``LlamaForCausalLM``.
        dtype: ``float32``, ``float16`` or ``bfloat16`` (``auto`` only before it is resolved).
        max_model_len: Most tokens of prompt and output together.
        fit_max_model_len: Lower it to what the KV cache can hold, once that is known.
        vocab_size: Rows of the embedding; token ids are below it.
        hidden_size: Width of the residual stream.
        num_layers: Transformer layers.
        num_attention_heads: Query heads.
        num_kv_heads: Key and value heads (fewer than query heads with GQA).
        head_dim: Width of one head.
        seed: Seed of the engine: dummy weights, and requests without a seed of their own.
        skip_tokenizer_init: Serve token ids only.
        served_model_name: Names that clients may use; the first is reported.
        eos_token_ids: Ids that end a generation, from generation_config.json, else config.json.
        generation_config: The model's own sampling defaults, ``{}`` when there are none.
        enforce_eager: Never capture CUDA graphs.
        max_logprobs: Most candidates per place whose log-probabilities a request may ask for; -1: the whole vocabulary.
        logprobs_mode: What is given as log-probabilities of sampled tokens, one of ``LOGPROBS_MODES``.
        logits_processors: Batch classes that change logits, as ``module:Class``; or, in one process, the classes.
        trust_remote_code: Python code of the model's folder may run, if no built-in code knows the architecture.
        model_impl: Whose modelling code runs: ``rustvllm`` or ``transformers``.
    """

    model: str
    path: Path
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_path: Path | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    architecture: str
    dtype: str = "auto"
    max_model_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    seed: int = 0
    skip_tokenizer_init: bool = False
    served_model_name: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    enforce_eager: bool = False
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    trust_remote_code: bool = False
    logits_processors: tuple[Any, ...] = ()
    model_impl: str = "rustvllm"
    fit_max_model_len: bool = False

    def __post_init__(self) -> None:
        require_choice("model_impl", self.model_impl, MODEL_IMPLS[1:])
        require_choice("dtype", self.dtype, ("auto", *DTYPES))
        for name in ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim"):
            require_int(name, getattr(self, name), 1)
        require_int("max_model_len", self.max_model_len, 1)
        require_int("max_logprobs", self.max_logprobs, -1, LARGEST_MAX_LOGPROBS)
        if self.max_logprobs == -1 and self.vocab_size > LARGEST_MAX_LOGPROBS:
            raise ConfigError(
                f"max_logprobs=-1 means the vocabulary, which has {self.vocab_size} tokens; at most "
                f"{LARGEST_MAX_LOGPROBS} are possible"
            )
        require_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        require_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.num_attention_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        # Read-only views: threads share the configuration, so it must not change.
        object.__setattr__(self, "hf_config", MappingProxyType(dict(self.hf_config)))
        object.__setattr__(self, "generation_config", MappingProxyType(dict(self.generation_config)))
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", (self.model,))

    def check_num_logprobs(self, param: str, asked: int | None) -> None:
        """Refuse more candidates than a request may ask for.

        Args:
            param: The parameter, for the message.
            asked: Candidates per place; -1: the vocabulary; None if the request asks for none.

        Raises:
            InvalidRequestError: Names the parameter, the value and the limit.
        """
        most = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        num_asked = self.vocab_size if asked == -1 else asked
        if num_asked is None or num_asked <= most or self.max_logprobs == -1:
            return
        shown = f"-1 (the vocabulary of {self.vocab_size} tokens)" if asked == -1 else asked
        raise InvalidRequestError(
            f"{param} is {shown}, at most {most} are given; the engine's max_logprobs can be raised (-1: no limit)",
            param,
        )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache: size of a block and how many there are.

    The number of blocks is ``num_gpu_blocks_override`` when given, else what fits into ``kv_cache_memory_bytes`` when
    given, else a fraction of the memory: of the GPU's (``gpu_memory_utilization``, weights included) or of the
    container's memory limit on the CPU (``cpu_kv_cache_fraction``, the KV cache alone).

    ``prefix_caching_hash_algo`` is a name out of ``PREFIX_CACHING_HASH_ALGOS``; ``hash_algorithm`` is what runs for it.

    ``swap_space`` is the CPU memory, in GiB, for the KV of preempted requests. It is taken only when preemption is by
    swap.

    ``kv_cache_dtype`` is a name out of ``KV_CACHE_DTYPES``.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_fraction: float = 0.2
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "builtin"
    swap_space: float = 4.0
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        require_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        require_number("swap_space", self.swap_space, 0, MAX_SWAP_SPACE)
        require_choice("prefix_caching_hash_algo", self.prefix_caching_hash_algo, tuple(PREFIX_CACHING_HASH_ALGOS))
        require_int("block_size", self.block_size, 1, 1024)
        require_fraction("gpu_memory_utilization", self.gpu_memory_utilization)
        require_fraction("cpu_kv_cache_fraction", self.cpu_kv_cache_fraction)
        if self.kv_cache_memory_bytes is not None:
            require_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if self.num_gpu_blocks_override is not None:
            # One block is the null block, which holds no tokens.
            require_int("num_gpu_blocks_override", self.num_gpu_blocks_override, 2, 2**31 - 1)

    @property
    def is_fp8(self) -> bool:
        """Whether the cache holds numbers of eight bits."""
        return self.kv_cache_dtype != "auto"

    @property
    def hash_algorithm(self) -> HashAlgorithm:
        """The function that names cached blocks."""
        return PREFIX_CACHING_HASH_ALGOS[self.prefix_caching_hash_algo]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the waiting queue, in requests and tokens, and what happens when blocks are short.

    Attributes:
        max_num_seqs: Requests in one step at most.
        max_num_batched_tokens: Tokens in one step at most.
        enable_chunked_prefill: A prompt may be computed over several steps.
        long_prefill_token_threshold: Longest chunk, where prompts are chunked, next to other requests; 0: no limit.
        scheduling_policy: ``fcfs``, ``priority`` or ``fair``: tenants share the engine by their weights.
        max_num_queued_reqs: Requests that may wait.
        max_num_queued_tokens: Prompt tokens that may wait, of all clients; 0: no limit. An empty queue takes any.
        queue_timeout: Seconds that a request may wait for its first step; 0 for as long as it takes.
        watermark: Share of the KV blocks that an admission must leave free while other requests run.
        preemption_mode: What happens to the KV of a preempted request.
        preemption_immunity_steps: Steps in which a resumed request is not preempted again if there is another victim.
        max_look_past: Waiting requests tried in a step after one that does not fit; 0 keeps the order.
        max_times_passed: How often later requests may pass one that does not fit.
        async_scheduling: A step is planned while the device computes the one before it.
        structured_outputs_fast_forward: Tokens that a grammar leaves no choice about take no step each.
        grammar_mask_wait_ms: How long a step waits behind the model for late masks, before it goes on without them.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int = 65536
    max_num_queued_tokens: int = 0
    queue_timeout: float = 0.0
    watermark: float = 0.0
    preemption_mode: PreemptionMode = "recompute"
    preemption_immunity_steps: int = 8
    max_look_past: int = 0
    max_times_passed: int = 8
    async_scheduling: bool = False
    structured_outputs_fast_forward: bool = True
    grammar_mask_wait_ms: float = 0.0

    def __post_init__(self) -> None:
        require_int("max_num_seqs", self.max_num_seqs, 1, 65536)
        require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**24)
        require_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, 2**31 - 1)
        require_int("max_num_queued_reqs", self.max_num_queued_reqs, 1, 2**24)
        require_int("max_num_queued_tokens", self.max_num_queued_tokens, 0, 2**40)
        require_number("queue_timeout", self.queue_timeout, 0, 365 * 86400)
        require_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        require_number("watermark", self.watermark, 0, 1)
        require_number("grammar_mask_wait_ms", self.grammar_mask_wait_ms, 0, 10_000)
        require_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        for name in ("preemption_immunity_steps", "max_look_past", "max_times_passed"):
            require_int(name, getattr(self, name), 0, 2**31 - 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token of a step"
            )


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where tensors live, and what computes there.

    Attributes:
        device: ``cpu`` or ``cuda``.
        attention_backend: ``triton`` (on CUDA), ``cpu`` (the core's kernels), ``torch`` (anywhere), or ``auto``:
            Triton's or the core's where they can compute. Under ``TRITON_INTERPRET=1`` Triton's run on the CPU.
        batch_invariant: A request's logits are bit-identical whatever else is in the batch.
        cpu_threads: Threads that compute on a CPU, of each rank; None: ``OMP_NUM_THREADS``, or as the machine allows.
    """

    device: str = "cpu"
    attention_backend: str = "auto"
    batch_invariant: bool = False
    cpu_threads: int | None = None

    def __post_init__(self) -> None:
        require_choice("device", self.device, DEVICES)
        require_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.cpu_threads is not None:
            require_int("cpu_threads", self.cpu_threads, 1, MOST_CPU_THREADS)
            if self.device != "cpu":
                raise ConfigError(f"cpu_threads is {self.cpu_threads}, but device is {self.device}: it is for the CPU")
        attention_backends.check_device(self.attention_backend, self.device, batch_invariant=self.batch_invariant)


@dataclass(frozen=True, kw_only=True)
class CUDAGraphConfig:
    """Which steps run as CUDA graphs, where the device and the attention backend have them.

    Attributes:
        capture_sizes: Numbers of requests that are captured, ascending; decodes run in the next larger one. None:
            chosen by ``max_num_seqs``. Empty: no step does.
        capture_mode: ``ahead``: those that are often needed, before the first request; ``lazy``: each when a step first
            needs it.
        max_mixed_tokens: Steps with pieces of prompts run as graphs up to so many tokens; 0: none does.
    """

    capture_sizes: tuple[int, ...] | None = None
    capture_mode: str = "ahead"
    max_mixed_tokens: int = 2048

    def __post_init__(self) -> None:
        require_choice("cudagraph_capture_mode", self.capture_mode, CAPTURE_MODES)
        require_int("cudagraph_mixed_tokens", self.max_mixed_tokens, 0, 65536)
        for size in self.capture_sizes or ():
            require_int("cudagraph_capture_sizes", size, 1, 65536)
        if self.capture_sizes is not None:
            object.__setattr__(self, "capture_sizes", tuple(sorted(set(self.capture_sizes))))


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How weights are found, from safetensors or seeded random ones (``dummy``), and how they are kept.

    Attributes:
        load_format: ``auto``, ``safetensors`` or ``dummy``.
        download_dir: Where downloads are kept; None: the hub's own cache.
        quantization: A name out of ``QUANTIZATIONS`` for the weights of dense layers; None: as the model's dtype.
        use_tqdm_on_load: Whether a bar, or a line in the log now and then, shows how far loading is.
        merge_lora: Folders of adapters that are added to the weights meanwhile.
    """

    load_format: str = "auto"
    download_dir: Path | None = None
    quantization: str | None = None
    use_tqdm_on_load: bool = True
    merge_lora: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_choice("load_format", self.load_format, LOAD_FORMATS)
        if self.quantization is not None:
            require_choice("quantization", self.quantization, QUANTIZATIONS)


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """A simulated model: how long its steps take and when its answers end.

    Attributes:
        step_time: Milliseconds of every step.
        time_per_token: More for each token that the step runs.
        time_per_context_token: More for each token of context that its requests attend to.
        eos_after: An answer ends after so many tokens (or ``min_tokens``, if that is more); None: never by itself.
    """

    step_time: float = 0.0
    time_per_token: float = 0.0
    time_per_context_token: float = 0.0
    eos_after: int | None = None

    def __post_init__(self) -> None:
        for name in ("step_time", "time_per_token", "time_per_context_token"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SIM_MS:
                raise ConfigError(f"sim_{name} must be between 0 and {MAX_SIM_MS:g} milliseconds, got {value!r}")
        if self.eos_after is not None:
            require_int("sim_eos_after", self.eos_after, 0, 2**31 - 1)

    @property
    def takes_time(self) -> bool:
        """Whether a step takes any time at all."""
        return self.step_time + self.time_per_token + self.time_per_context_token > 0


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Where records of requests go.

    Attributes:
        log: The logger ``rustvllm.trace``.
        file: A file in the format of Chrome and Perfetto, which the process that begins it has made.
        otlp_endpoint: A collector of OpenTelemetry spans, as a URL.
    """

    log: bool = False
    file: Path | None = None
    otlp_endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from.

    With ``sim`` no model is loaded: its steps are simulated. When and what each step ran goes to ``step_trace_file``.
    With ``log_stats`` times and sizes of requests and steps are counted. With ``speculation`` steps run drafts.
    With ``lora`` requests may name adapters. ``draft_model`` is the second model of ``speculation``, if that has one.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cuda_graphs: CUDAGraphConfig = field(default_factory=CUDAGraphConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    sim: SimConfig | None = None
    tracing: TracingConfig = field(default_factory=TracingConfig)
    step_trace_file: Path | None = None
    log_stats: bool = True
    speculation: SpeculationConfig | None = None
    draft_model: ModelConfig | None = None
    lora: LoRAConfig | None = None

    def __post_init__(self) -> None:
        budget, longest = self.scheduler.max_num_batched_tokens, self.model.max_model_len
        if not self.scheduler.enable_chunked_prefill and budget < longest:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({budget}) must be at least "
                f"max_model_len ({longest}): raise the former, lower the latter, or enable chunked prefill"
            )
        if self.step_trace_file is not None and self.parallel.data_parallel_size > 1:
            raise ConfigError(
                f"step_trace_file takes the steps of one engine, but data_parallel_size is "
                f"{self.parallel.data_parallel_size}: leave one of them out"
            )
        if self.scheduler.preemption_mode == "swap" and self.cache.swap_space == 0:
            raise ConfigError(
                "preemption_mode is swap, but swap_space is 0 GiB: give it memory, or set preemption_mode to recompute"
            )
        if self.load.merge_lora:
            check_merging(self)
        if self.lora is not None:
            check_adapters(self, self.lora)
        if self.draft_model is not None:
            check_draft_model(self, self.draft_model)
        if self.parallel.num_ranks > 1:
            self._check_ranks()
        backend, device = self.device.attention_backend, self.device.device
        attention_backends.check_dtype(backend, device, self.model.dtype)
        quantization = None if self.load.quantization in STORED_QUANTIZATIONS else self.load.quantization
        if quantization is not None and self.device.device != "cpu":
            raise ConfigError(
                f"quantization is {quantization}, which only the CPU's kernels compute, but device is "
                f"{self.device.device}: leave it out, or set device to cpu"
            )
        wishes = {"quantization": quantization, "batch_invariant": self.device.batch_invariant}
        for name, wish in wishes.items():
            if wish and self.device.device == "cpu" and self.model.dtype == "float16":
                raise ConfigError(
                    f"{name} is for the CPU's kernels, which compute in float32 and bfloat16, but dtype is float16: "
                    "set dtype to float32 or bfloat16"
                )
        if (sizes := self.cuda_graphs.capture_sizes) and sizes[-1] > self.scheduler.max_num_seqs:
            raise ConfigError(
                f"cudagraph_capture_sizes has {sizes[-1]}, but no step has more than max_num_seqs "
                f"({self.scheduler.max_num_seqs}) requests: leave it out, or raise max_num_seqs"
            )
        if self.cuda_graphs.capture_sizes:
            attention_backends.check_graphs(backend, device)
        if self.cache.is_fp8:
            attention_backends.check_fp8(backend, device, self.cache.kv_cache_dtype)
        if self.cache.num_gpu_blocks_override is not None and not self.model.fit_max_model_len:
            self.check_num_blocks(self.cache.num_gpu_blocks_override)

    def _check_ranks(self) -> None:
        model, parallel = self.model, self.parallel
        tensor_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        if tensor_size > 1:
            check_split(tensor_size, model.num_attention_heads, model.num_kv_heads, model.hf_config)
        check_stages(num_stages, model.hf_config)
        refused = {
            "executor=sim, which has no ranks": self.sim is not None,
            f"model_impl=transformers: {model.architecture} runs by transformers' code, which is not split": (
                model.model_impl == "transformers"
            ),
        }
        if num_stages > 1:
            refused |= {
                "enable_lora: the layers of one adapter lie in several stages": self.lora is not None,
                "device=cuda: stages hand their rows on by the CPU only, so far": self.device.device == "cuda",
                "speculative_config: a draft follows a token that is known": self.speculation is not None,
            }
        size, name = (num_stages, "pipeline") if num_stages > 1 else (tensor_size, "tensor")
        for reason, is_asked in refused.items():
            if is_asked:
                raise ConfigError(f"{name}_parallel_size is {size} and cannot be combined with {reason}; leave one out")

    def fitted(self, num_blocks: int) -> "EngineConfig":
        """The same with a ``max_model_len`` that a KV cache can hold, if it is to be fitted; else this one.

        Args:
            num_blocks: Blocks of the pool, the null block included.
        """
        fits = max(num_blocks - 1, 0) * self.cache.block_size
        if not self.model.fit_max_model_len or not 0 < fits < self.model.max_model_len:
            return self
        return self.with_max_model_len(fits)

    def with_max_model_len(self, max_model_len: int) -> "EngineConfig":
        """The same with another ``max_model_len``: the one that an engine has settled on."""
        if max_model_len == self.model.max_model_len:
            return self
        return replace(self, model=replace(self.model, max_model_len=max_model_len, fit_max_model_len=False))

    def check_num_blocks(self, num_blocks: int) -> None:
        """Refuse a KV cache in which one request of ``max_model_len`` tokens would not fit.

        Args:
            num_blocks: Blocks of the pool, the null block included.

        Raises:
            ConfigError: Names the blocks needed and the ``max_model_len`` that would fit.
        """
        block_size, longest = self.cache.block_size, self.model.max_model_len
        usable = num_blocks - 1
        needed = -(-longest // block_size)
        if usable < needed:
            fits = max(usable, 0) * block_size
            share = "cpu_kv_cache_fraction" if self.device.device == "cpu" else "gpu_memory_utilization"
            advice = f"set max_model_len to {fits} or less" if fits else "give the KV cache more memory"
            raise ConfigError(
                f"the KV cache has {max(usable, 0)} usable blocks of {block_size} tokens, but one request of "
                f"max_model_len {longest} needs {needed}: {advice}, or raise num_gpu_blocks_override, "
                f"kv_cache_memory_bytes or {share}"
            )


METRICS_PREFIX = "vllm:"
"""Before the names of metrics, unless told otherwise: dashboards for vLLM work."""

UsageContext = Literal["llm_class", "api_server"]
"""What the engine is built for: ``LLM`` gets defaults for throughput, the server defaults for latency."""
