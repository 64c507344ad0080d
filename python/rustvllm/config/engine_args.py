"""Engine arguments: one dataclass for ``LLM(...)``, ``LLMEngine`` and the command line, turned into an EngineConfig.

This module decides defaults that depend on the machine or the use (throughput for ``LLM``, latency for the server).
``flags.engine`` declares the arguments, under their field names; ``flags.refused`` has those that are not built.
"""

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from rustvllm.config import (
    ATTENTION_BACKENDS,
    EXECUTORS,
    LARGEST_MAX_LOGPROBS,
    LOGPROBS_MODES,
    MODEL_IMPLS,
    QUANTIZATIONS,
    STORED_QUANTIZATIONS,
    CacheConfig,
    CUDAGraphConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SimConfig,
    TracingConfig,
    UsageContext,
    devices,
    hub,
    require_choice,
    require_int,
)
from rustvllm.config.checkpoint.gguf_file import is_gguf
from rustvllm.config.checkpoint.quantized_folders import check_method, read_quantization
from rustvllm.config.flags import refused
from rustvllm.config.flags.engine import EngineFlags
from rustvllm.config.flags.fields import add_flags
from rustvllm.config.generation_defaults import check_generation_config, check_override
from rustvllm.config.lora import LoRAConfig, folders_to_merge, make_lora_config
from rustvllm.config.model_folder import read_model_config, resolve_dtype
from rustvllm.config.pooler import check_pooling_flags
from rustvllm.config.speculation import SpeculationConfig, make_speculation_config
from rustvllm.config.tracing import make_tracing_config
from rustvllm.config.vision.flags import read_image_limit, read_pixel_limits
from rustvllm.exceptions import ConfigError
from rustvllm.logger import init_logger
from rustvllm.parameter_checks import refuse_attribute

logger = init_logger(__name__)

_GIB: Final = 1 << 30
_TIMES_PASSED_WITH_ADAPTERS: Final = 64
"""Requests whose adapters run pass one whose adapter has no place; eight of them can do so in a single step."""


class EngineArgs(EngineFlags):
    """The arguments of an engine, before anything is looked up. None lets the model or the machine decide."""

    default_usage: ClassVar[UsageContext] = "llm_class"

    def __init__(self, **kwargs: Any) -> None:
        """Accept the fields of :class:`EngineFlags`, as :meth:`from_kwargs` does."""
        super().__init__(**self._known(kwargs))

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """Engine arguments from keywords.

        Raises:
            TypeError: A keyword does not exist; the message names the nearest one that does.
            ConfigError: A keyword asks for a feature that is not supported yet.
        """
        return cls(**kwargs)

    @classmethod
    def _known(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords that are fields, without those that are None; others must ask for nothing that is to come."""
        names = cls.argument_names()
        for name, value in kwargs.items():
            if name in names:
                continue
            if name not in refused.argument_names():
                near = difflib.get_close_matches(name, sorted(names), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"there is no engine argument {name!r}{hint}")
            refused.check_argument(name, value)
        return {name: value for name, value in kwargs.items() if name in names and value is not None}

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every argument; ``-`` and ``_`` mean the same, switches also have a ``--no-`` form."""
        return add_flags(parser, dataclasses.fields(cls))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Engine arguments from parsed flags; other flags of the parser are ignored."""
        return cls(**{name: getattr(args, name) for name in cls.argument_names() if hasattr(args, name)})

    def create_engine_config(self, usage_context: UsageContext | None = None) -> EngineConfig:
        """Find the model, read its configuration and settle every default.

        Args:
            usage_context: ``llm_class`` for throughput, ``api_server`` for latency; None: the class's own.

        Raises:
            ConfigError: An argument is wrong or contradicts another.
            ModelLoadError: The model cannot be found, fetched or understood.
        """
        usage = usage_context or self.default_usage
        self._check()
        sim = self._create_sim_config()
        device = self.device
        if device == "auto":
            device = "cpu" if sim else devices.detect_device()
        cache = CacheConfig(
            block_size=self.block_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            cpu_kv_cache_fraction=self.cpu_kv_cache_fraction,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            enable_prefix_caching=self.enable_prefix_caching,
            prefix_caching_hash_algo=self.prefix_caching_hash_algo,
            swap_space=self.swap_space,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        download_dir = None if self.download_dir is None else Path(self.download_dir).expanduser()
        load = LoadConfig(
            load_format=self.load_format,
            download_dir=download_dir,
            quantization=self.quantization,
            use_tqdm_on_load=self.use_tqdm_on_load,
            merge_lora=folders_to_merge(self.merge_lora, download_dir),
        )
        lora = self._create_lora_config(download_dir)  # before the model, which may take much longer to come
        model = self._create_model_config(device, load)
        speculation = make_speculation_config(self.speculative_config)
        if model.pooler is not None and model.pooler.seq_pooling_type != "LAST":
            # A token that is found in the cache has no hidden state.
            cache = dataclasses.replace(cache, enable_prefix_caching=False)
        return EngineConfig(
            model=model,
            cache=cache,
            scheduler=self._create_scheduler_config(usage, device, model.max_model_len),
            speculation=speculation,
            draft_model=None if speculation is None else self._create_draft_model_config(speculation, model, load),
            lora=lora,
            parallel=self._create_parallel_config(device),
            device=DeviceConfig(
                device=device,
                attention_backend=self.attention_backend,
                batch_invariant=self.batch_invariant,
                cpu_threads=self.cpu_threads,
            ),
            cuda_graphs=self._create_cuda_graph_config(),
            load=load,
            sim=sim,
            tracing=self.create_tracing_config(),
            step_trace_file=None
            if self.step_trace_file is None
            else Path(self.step_trace_file).expanduser().absolute(),
            log_stats=not self.disable_log_stats,
        )

    def __getattr__(self, name: str) -> Any:
        """Say of what is not built yet that it is not, in place of a bare name."""
        refuse_attribute(self, name, refused.METHODS)

    def check_early(self) -> None:
        """Check the values at once, and, if the model is a local folder, check them against the model.

        Raises:
            ConfigError: An argument is wrong or contradicts another.
            ModelLoadError: The model cannot be read or understood.
        """
        self._check()
        named = (self.model, self.tokenizer, self.hf_config_path)
        if all(name is None or Path(name).expanduser().is_dir() for name in named):
            self.create_engine_config()

    def create_tracing_config(self) -> TracingConfig:
        """Where records of requests go; ``RUSTVLLM_TRACE`` decides when ``trace`` is None.

        Raises:
            ConfigError: The endpoint is not a URL, or contains a password.
        """
        return make_tracing_config(self.trace, self.trace_file, self.otlp_traces_endpoint)

    def _create_parallel_config(self, device: str) -> ParallelConfig:
        parallel = ParallelConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            master_addr=self.master_addr,
            master_port=self.master_port,
            distributed_executor_backend=self.distributed_executor_backend,
            distributed_timeout_seconds=self.distributed_timeout_seconds,
        )
        size, each = parallel.tensor_parallel_size, min(parallel.tensor_parallel_size, parallel.ranks_per_node)
        if each > 1 and device == "cuda" and each > (num_gpus := len(devices.visible_gpus())):
            nodes = f" on each of {parallel.nnodes} nodes" if parallel.nnodes > 1 else ""
            raise ConfigError(
                f"tensor_parallel_size is {size}, which needs {each} CUDA devices{nodes}, but this machine has "
                f"{num_gpus} that can be used: lower it to {num_gpus * parallel.nnodes} or less, use more machines "
                "(nnodes), or set device to cpu"
            )
        return parallel

    def _create_cuda_graph_config(self) -> CUDAGraphConfig:
        sizes: Any = self.cudagraph_capture_sizes
        if sizes is not None:
            if not isinstance(sizes, list | tuple) or not sizes:
                raise ConfigError(
                    f"cudagraph_capture_sizes must be a list of one or more numbers of requests, got {sizes!r}; "
                    "enforce_eager turns CUDA graphs off"
                )
            if self.enforce_eager:
                raise ConfigError("cudagraph_capture_sizes and enforce_eager contradict each other: leave one out")
            sizes = tuple(sizes)
        return CUDAGraphConfig(
            capture_sizes=() if self.enforce_eager else sizes,
            capture_mode=self.cudagraph_capture_mode,
            max_mixed_tokens=self.cudagraph_mixed_tokens,
        )

    def _create_lora_config(self, download_dir: Path | None = None, *, may_fetch: bool = True) -> LoRAConfig | None:
        return make_lora_config(
            enable_lora=self.enable_lora,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
            dtype=self.lora_dtype,
            modules=self.lora_modules,
            download_dir=download_dir,
            may_fetch=may_fetch,
        )

    def _create_sim_config(self) -> SimConfig | None:
        if self.executor != "sim":
            return None
        return SimConfig(
            step_time=self.sim_step_time,
            time_per_token=self.sim_time_per_token,
            time_per_context_token=self.sim_time_per_context_token,
            eos_after=self.sim_eos_after,
        )

    def _check(self) -> None:
        """Check everything that needs no model, because looking up a model may take minutes."""
        require_choice("device", self.device, ("auto", "cpu", "cuda"))
        require_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        require_choice("executor", self.executor or "auto", EXECUTORS)
        if self.executor == "sim" and self.device == "cuda":
            raise ConfigError("device=cuda and executor=sim contradict each other: a simulation uses no device")
        if self.executor != "sim":
            for field in dataclasses.fields(self):
                if field.name.startswith("sim_") and getattr(self, field.name) != field.default:
                    raise ConfigError(f"{field.name} needs executor=sim")
        for name in (
            "model",
            "tokenizer",
            "revision",
            "download_dir",
            "step_trace_file",
            "trace_file",
            "hf_config_path",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str | Path) or not str(value)):
                raise ConfigError(f"{name} must be a non-empty string, got {value!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{field.name} must be true or false, got {value!r}")
        for name in ("async_scheduling", "trace"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise ConfigError(f"{name} must be true, false or None, got {value!r}")
        if self.max_model_len not in ("auto", -1) and self.max_model_len is not None:
            require_int("max_model_len", self.max_model_len, 1, 2**31 - 1)
        for name, limit in (("max_num_batched_tokens", None), ("max_num_seqs", None)):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, limit)
        require_int("seed", self.seed, -(2**63), 2**63 - 1)
        require_int("max_logprobs", self.max_logprobs, -1, LARGEST_MAX_LOGPROBS)
        require_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        resolve_dtype(self.dtype, "cpu", {})
        # Built for its checks: a limit that is still open gets a value that suits every other.
        SchedulerConfig(
            max_num_seqs=1 if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=2**24 if self.max_num_batched_tokens is None else self.max_num_batched_tokens,
            **self._scheduler_numbers(),
        )
        make_speculation_config(self.speculative_config)
        self._create_parallel_config("cpu")
        self._create_lora_config(may_fetch=False)
        if self.quantization is not None:
            require_choice("quantization", self.quantization, QUANTIZATIONS)
        self._create_cuda_graph_config()
        self.create_tracing_config()
        CacheConfig(swap_space=self.swap_space, prefix_caching_hash_algo=self.prefix_caching_hash_algo)
        check_generation_config(self.generation_config)
        check_override(self.override_generation_config)
        names: Any = self.served_model_name
        if names is not None and not (
            (isinstance(names, str) and names)
            or (isinstance(names, list | tuple) and names and all(isinstance(name, str) and name for name in names))
        ):
            raise ConfigError(f"served_model_name must be one or several non-empty strings, got {names!r}")
        _processor_names(self.logits_processors)
        require_choice("model_impl", self.model_impl, MODEL_IMPLS)
        _check_hf_overrides(self.hf_overrides)
        check_pooling_flags(self.runner, self.convert, self.pooler_config)
        read_image_limit(self.limit_mm_per_prompt)
        read_pixel_limits(self.mm_processor_kwargs)
        if self.tokenizer is not None and self.skip_tokenizer_init:
            raise ConfigError("tokenizer and skip_tokenizer_init contradict each other: leave one out")

    def _create_model_config(self, device: str, load: LoadConfig) -> ModelConfig:
        found = hub.resolve_model(
            None if self.model is None else str(self.model),
            self.revision,
            load.download_dir,
            with_weights=load.load_format != "dummy" and self.executor != "sim",
            with_code=self.trust_remote_code,
        )
        tokenizer_path = None
        if not self.skip_tokenizer_init:
            tokenizer_path = found.path
            if self.tokenizer is not None:
                tokenizer_path = resolve_tokenizer(str(self.tokenizer), load.download_dir)
        if self.served_model_name is None:
            served = (found.name, *found.aliases)
        else:
            names = [self.served_model_name] if isinstance(self.served_model_name, str) else self.served_model_name
            served = tuple(dict.fromkeys(names))
        if load.quantization == "gguf" and not is_gguf(found.path):
            raise ConfigError(
                f"quantization is gguf, but {found.name} is not a GGUF file: leave quantization out, or set model to a "
                "GGUF file or to owner/name:Q8_0"
            )
        is_fitted = self.max_model_len in ("auto", -1)
        max_model_len = None if is_fitted or isinstance(self.max_model_len, str) else self.max_model_len
        model = read_model_config(
            found.path,
            model=found.name,
            max_model_len=max_model_len,
            fit_max_model_len=is_fitted,
            dtype=self.dtype,
            device=device,
            generation_config=self.generation_config,
            override_generation_config=self.override_generation_config,
            hf_overrides=self.hf_overrides,
            model_impl=self.model_impl,
            revision=self.revision,
            tokenizer=None if self.tokenizer is None else str(self.tokenizer),
            tokenizer_path=tokenizer_path,
            seed=self.seed,
            skip_tokenizer_init=self.skip_tokenizer_init,
            served_model_name=served,
            enforce_eager=self.enforce_eager,
            trust_remote_code=self.trust_remote_code,
            hf_config_path=None
            if self.hf_config_path is None
            else resolve_tokenizer(str(self.hf_config_path), load.download_dir),
            logits_processors=_processor_names(self.logits_processors),
            runner=self.runner,
            convert=self.convert,
            pooler_config=self.pooler_config,
            limit_mm_per_prompt=self.limit_mm_per_prompt,
            mm_processor_kwargs=self.mm_processor_kwargs,
        )
        if not is_gguf(found.path):
            check_method(load.quantization, read_quantization(model.hf_config, found.path), found.name)
        elif load.quantization in STORED_QUANTIZATIONS and load.quantization != "gguf":
            raise ConfigError(
                f"quantization is {load.quantization}, but {found.name} is a GGUF file: leave quantization out"
            )
        return dataclasses.replace(model, max_logprobs=self.max_logprobs, logprobs_mode=self.logprobs_mode)

    def _create_draft_model_config(
        self, speculation: SpeculationConfig, target: ModelConfig, load: LoadConfig
    ) -> ModelConfig | None:
        """The second model of ``speculation``, if that has one, in the dtype of the first."""
        if speculation.model is None:
            return None
        with_weights = load.load_format != "dummy" and self.executor != "sim"
        found = hub.resolve_model(speculation.model, speculation.revision, load.download_dir, with_weights=with_weights)
        return read_model_config(
            found.path, model=found.name, dtype=target.dtype, seed=target.seed, tokenizer_path=found.path
        )

    def _create_scheduler_config(self, usage: UsageContext, device: str, max_model_len: int) -> SchedulerConfig:
        default_tokens, default_seqs = default_budget(usage, device)
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is None:
            tokens = default_tokens if self.enable_chunked_prefill else max(default_tokens, max_model_len)
            if isinstance(seqs, int) and seqs > 0:
                # A step never has more tokens than all its requests together, nor fewer than one for each.
                tokens = max(seqs, min(tokens, seqs * max_model_len))
                if not self.enable_chunked_prefill:
                    tokens = max(tokens, max_model_len)
        if seqs is None:
            seqs = min(default_seqs, tokens)
        return SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            enable_chunked_prefill=self.enable_chunked_prefill,
            # Torch on the CPU computes in the thread that would plan the next step, so that nothing would overlap.
            async_scheduling=(self.executor == "sim" or device == "cuda")
            and self.tensor_parallel_size * self.pipeline_parallel_size == 1
            if self.async_scheduling is None
            else self.async_scheduling,
            **self._scheduler_numbers(),
        )

    def _scheduler_numbers(self) -> dict[str, Any]:
        """Arguments of the scheduler: those passed on unchanged, and those derived from other arguments."""
        names = (
            "long_prefill_token_threshold",
            "stream_interval",
            "scheduling_policy",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "queue_timeout",
            "watermark",
            "preemption_mode",
            "preemption_immunity_steps",
            "max_look_past",
            "structured_outputs_fast_forward",
            "grammar_mask_wait_ms",
        )
        times_passed = self.max_times_passed
        if times_passed is None:
            times_passed = _TIMES_PASSED_WITH_ADAPTERS if self.enable_lora else SchedulerConfig.max_times_passed
        return {name: getattr(self, name) for name in names} | {"max_times_passed": times_passed}

    @classmethod
    def argument_names(cls) -> list[str]:
        """The names of all arguments."""
        return [field.name for field in dataclasses.fields(cls)]


class AsyncEngineArgs(EngineArgs):
    """Engine arguments with the defaults of a server."""

    default_usage: ClassVar[UsageContext] = "api_server"


def default_budget(usage: UsageContext, device: str) -> tuple[int, int]:
    """``(max_num_batched_tokens, max_num_seqs)`` for a use and a device, as vLLM 0.32 chooses them.

    A server takes smaller steps, so that no request waits long for a token; large GPUs take larger ones.
    """
    if device == "cpu":
        return (4096, 256) if usage == "llm_class" else (2048, 128)
    memory = devices.gpu_memory_bytes() or 0
    if memory >= 160 * _GIB:
        return 16384, 1024
    if memory >= 70 * _GIB:
        return (16384, 1024) if usage == "llm_class" else (8192, 1024)
    return (8192, 256) if usage == "llm_class" else (2048, 256)


def _check_hf_overrides(overrides: Any) -> None:
    """Refuse values that a ``config.json`` cannot hold."""
    if overrides is None:
        return
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"hf_overrides must be a dict of values for config.json, got {overrides!r:.200} "
            f"({type(overrides).__name__}); a function cannot be sent to the engine's process"
        )
    try:
        json.dumps(overrides, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"hf_overrides must only hold values that JSON can express: {error}, got {overrides!r:.200}"
        ) from error
    if unnamed := [name for name in overrides if not isinstance(name, str)]:
        raise ConfigError(f"the keys of hf_overrides must be strings, got {unnamed[0]!r}")


def resolve_tokenizer(name: str, download_dir: Path | None) -> Path:
    """Folder, or GGUF file, of a tokenizer given apart from the model; a folder needs no config.json."""
    try:
        folder = Path(name).expanduser()
        if folder.is_dir() or (is_gguf(folder) and folder.is_file()):
            return folder.absolute()
    except (OSError, ValueError, RuntimeError):  # too long, contains a NUL, or ``~user`` of an unknown user
        pass
    return hub.resolve_model(name, None, download_dir, with_weights=False, with_config=False).path


def _processor_names(processors: object) -> tuple[str | type[Any], ...]:
    """Names of the logits processors' batch classes; a class that cannot be imported by name stays a class."""
    if processors is None:
        return ()
    if isinstance(processors, str | type) or not isinstance(processors, Sequence):
        raise ConfigError(f"logits_processors must be a list of 'module:Class' or of classes, got {processors!r}")
    names: list[str | type[Any]] = []
    for each in processors:
        if isinstance(each, type):
            found: Any = sys.modules.get(each.__module__) if each.__module__ != "__main__" else None
            for part in each.__qualname__.split("."):
                found = getattr(found, part, None)
            names.append(f"{each.__module__}:{each.__qualname__}" if found is each else each)
        elif isinstance(each, str) and all(each.partition(":")):
            names.append(each)
        else:
            raise ConfigError(
                f"logits_processors: {each!r} is neither of the form module:Class nor a class; pass functions in "
                "SamplingParams(logits_processors=[...])"
            )
    return tuple(names)
