"""The engine's configuration: frozen parts in one frozen :class:`EngineConfig`, checked where they are built.

Plain data without torch: a process that serves HTTP makes it, and one that computes reads it. Each part refuses
values out of range; rules that concern two parts are in ``EngineConfig.__post_init__``. Defaults that depend on the
machine or the use are decided in ``engine_args``, never here.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rustvllm.config import attention_backends
from rustvllm.config.attention_backends import ATTENTION_BACKENDS
from rustvllm.config.cache import CacheConfig
from rustvllm.config.checkpoint.quantized_folders import FOLDER_METHODS, SAME_METHODS
from rustvllm.config.lora import LoRAConfig, check_adapters, check_merging
from rustvllm.config.model import ModelConfig
from rustvllm.config.parallel import ParallelConfig, check_split, check_stages
from rustvllm.config.pooler import check_pooling
from rustvllm.config.ranges import require_choice, require_int
from rustvllm.config.scheduler import SchedulerConfig
from rustvllm.config.speculation import SpeculationConfig, check_draft_model
from rustvllm.config.tracing import TracingConfig
from rustvllm.config.vision.combinations import check_vision
from rustvllm.exceptions import ConfigError

DEVICES = ("cpu", "cuda")
MOST_CPU_THREADS = 1024
"""The most threads that the core starts."""
STORED_QUANTIZATIONS = ("gguf", *FOLDER_METHODS, *SAME_METHODS)
"""Formats that only a checkpoint can have; if one is named, it is compared with the checkpoint's."""
QUANTIZATIONS = (
    "int8", "int8-g32", "int8-g64", "int8-g128", "int4-g32", "int4-g64", "int4-g128", *STORED_QUANTIZATIONS,
)  # fmt: skip
"""Weights of one byte: with a scale for each output of a layer, or for each output and group of so many inputs; gguf:
as a GGUF file has them."""
LOAD_FORMATS = ("auto", "safetensors", "dummy")
CAPTURE_MODES = ("ahead", "lazy")
EXECUTORS = ("auto", "uniproc", "sim")
MAX_SIM_MS = 60_000.0
"""The most that each term of a simulated step's time may be."""


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The device, and what computes on it.

    Attributes:
        device: ``cpu`` or ``cuda``.
        attention_backend: ``triton`` (on CUDA), ``cpu`` (the core's kernels), ``torch`` (anywhere), or ``auto``:
            Triton's or the core's where they can compute. Under ``TRITON_INTERPRET=1`` Triton's run on the CPU.
        batch_invariant: A request's logits are bit-identical in any batch.
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
                raise ConfigError(
                    f"cpu_threads is {self.cpu_threads}, but device is {self.device}: only the CPU uses it"
                )
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
    """Where weights come from (safetensors, or seeded random ones with ``dummy``), and how they are stored.

    Attributes:
        load_format: ``auto``, ``safetensors`` or ``dummy``.
        download_dir: Folder for downloads; None: the hub's own cache.
        quantization: A name out of ``QUANTIZATIONS`` for the weights of dense layers; None: as the model's dtype.
        use_tqdm_on_load: Show the progress of loading, with a bar or with occasional log lines.
        merge_lora: Folders of adapters that loading adds to the weights.
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
                f"without chunked prefill, max_num_batched_tokens ({budget}) must be at least max_model_len "
                f"({longest}): raise max_num_batched_tokens, lower max_model_len, or enable chunked prefill"
            )
        if self.step_trace_file is not None and self.parallel.data_parallel_size > 1:
            raise ConfigError(
                "step_trace_file records the steps of one engine, but data_parallel_size is "
                f"{self.parallel.data_parallel_size}: leave one of them out"
            )
        if self.scheduler.preemption_mode == "swap" and self.cache.swap_space == 0:
            raise ConfigError(
                "preemption_mode is swap, but swap_space is 0 GiB: raise swap_space, or set preemption_mode to "
                "recompute"
            )
        if self.load.merge_lora:
            check_merging(self)
        if self.lora is not None:
            check_adapters(self, self.lora)
        if self.draft_model is not None:
            check_draft_model(self, self.draft_model)
        if self.model.pooler is not None:
            check_pooling(self, self.model.pooler)
        if self.model.vision is not None:
            object.__setattr__(self, "model", check_vision(self, self.model.vision))
        if self.parallel.num_ranks > 1:
            self._check_ranks()
        backend, device = self.device.attention_backend, self.device.device
        attention_backends.check_dtype(backend, device, self.model.dtype)
        quantization = None if self.load.quantization in STORED_QUANTIZATIONS else self.load.quantization
        if quantization is not None and self.device.device != "cpu":
            raise ConfigError(
                f"quantization is {quantization}, which only the CPU's kernels support, but device is "
                f"{self.device.device}: leave quantization out, or set device to cpu"
            )
        wishes = {"quantization": quantization, "batch_invariant": self.device.batch_invariant}
        for name, wish in wishes.items():
            if wish and self.device.device == "cpu" and self.model.dtype == "float16":
                raise ConfigError(
                    f"{name} needs the CPU's kernels, which compute in float32 and bfloat16, but dtype is float16: set "
                    "dtype to float32 or bfloat16"
                )
        if (sizes := self.cuda_graphs.capture_sizes) and sizes[-1] > self.scheduler.max_num_seqs:
            raise ConfigError(
                f"cudagraph_capture_sizes has {sizes[-1]}, but a step has at most max_num_seqs "
                f"({self.scheduler.max_num_seqs}) requests: remove that size, or raise max_num_seqs"
            )
        if self.cuda_graphs.capture_sizes:
            attention_backends.check_graphs(backend, device)
        attention_backends.check_cache_dtype(backend, device, self.model.dtype, self.cache.kv_cache_dtype)
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
            f"model_impl=transformers: transformers' code runs {model.architecture}, and ranks cannot share it": (
                model.model_impl == "transformers"
            ),
        }
        if num_stages > 1:
            refused |= {
                "enable_lora: an adapter's layers would be in several stages": self.lora is not None,
                "device=cuda: so far, stages only run on the CPU": self.device.device == "cuda",
                "speculative_config: a draft needs the token before it, which other "
                "stages still compute": self.speculation is not None,
            }
        size, name = (num_stages, "pipeline") if num_stages > 1 else (tensor_size, "tensor")
        for reason, is_asked in refused.items():
            if is_asked:
                raise ConfigError(f"{name}_parallel_size is {size} and cannot be combined with {reason}; leave one out")

    def fitted(self, num_blocks: int) -> "EngineConfig":
        """This configuration; with ``fit_max_model_len``, lower ``max_model_len`` to what the KV cache holds.

        Args:
            num_blocks: Blocks of the pool, the null block included.
        """
        fits = max(num_blocks - 1, 0) * self.cache.block_size
        if not self.model.fit_max_model_len or not 0 < fits < self.model.max_model_len:
            return self
        return self.with_max_model_len(fits)

    def with_max_model_len(self, max_model_len: int) -> "EngineConfig":
        """This configuration with another ``max_model_len``: the one that the engine chose."""
        if max_model_len == self.model.max_model_len:
            return self
        vision = None if self.model.vision is None else self.model.vision.for_length(max_model_len)
        model = replace(self.model, max_model_len=max_model_len, fit_max_model_len=False, vision=vision)
        return replace(self, model=model)

    def check_num_blocks(self, num_blocks: int) -> None:
        """Refuse a KV cache that cannot hold one request of ``max_model_len`` tokens.

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
"""Default prefix of metric names, so that dashboards for vLLM work."""

UsageContext = Literal["llm_class", "api_server"]
"""What the engine is built for: ``LLM`` gets defaults for throughput, the server defaults for latency."""
