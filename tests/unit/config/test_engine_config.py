"""The parts of the configuration refuse what is out of range, and never change."""

import dataclasses
from pathlib import Path

import pytest

from rustvllm import _core
from rustvllm.config import (
    CacheConfig,
    CUDAGraphConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from rustvllm.exceptions import ConfigError
from rustvllm.observe.inspect.description import describe_engine

MODEL = {
    "model": "m",
    "path": Path("/nowhere"),
    "architecture": "LlamaForCausalLM",
    "max_model_len": 100,
    "vocab_size": 10,
    "hidden_size": 8,
    "num_layers": 1,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
}


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        (CacheConfig, "block_size", 0, "at least 1, got 0"),
        (CacheConfig, "block_size", 2048, "at most 1024"),
        (CacheConfig, "block_size", 16.0, "integer"),
        (CacheConfig, "gpu_memory_utilization", 0.0, "greater than 0 and at most 1, got 0"),
        (CacheConfig, "gpu_memory_utilization", 1.5, "at most 1"),
        (CacheConfig, "gpu_memory_utilization", float("nan"), "got nan"),
        (CacheConfig, "gpu_memory_utilization", "0.9", "number"),
        (CacheConfig, "cpu_kv_cache_fraction", -1, "greater than 0"),
        (CacheConfig, "kv_cache_memory_bytes", 0, "at least 1"),
        (CacheConfig, "num_gpu_blocks_override", 1, "at least 2"),
        (CacheConfig, "num_gpu_blocks_override", True, "integer"),
        (SchedulerConfig, "max_num_seqs", 0, "at least 1"),
        (SchedulerConfig, "max_num_batched_tokens", 0, "at least 1"),
        (SchedulerConfig, "long_prefill_token_threshold", -1, "at least 0"),
        (SchedulerConfig, "stream_interval", 0, "at least 1"),
        (SchedulerConfig, "stream_interval", True, "integer"),
        (SchedulerConfig, "stream_interval", 2**31, "at most 2147483647"),
        (SchedulerConfig, "scheduling_policy", "lifo", "fcfs, priority, fair, got 'lifo'"),
        (SchedulerConfig, "max_num_queued_reqs", 0, "at least 1"),
        (SchedulerConfig, "max_num_queued_tokens", -1, "at least 0"),
        (SchedulerConfig, "max_num_queued_tokens", 1.5, "integer"),
        (SchedulerConfig, "queue_timeout", -1, "at least 0 and less than"),
        (SchedulerConfig, "queue_timeout", float("inf"), "got inf"),
        (SchedulerConfig, "queue_timeout", "1", "number, got '1'"),
        (SchedulerConfig, "watermark", 1.0, "at least 0 and less than 1, got 1.0"),
        (SchedulerConfig, "watermark", -0.1, "at least 0 and less than 1, got -0.1"),
        (SchedulerConfig, "watermark", float("nan"), "less than 1, got nan"),
        (SchedulerConfig, "watermark", "0.1", "number, got '0.1'"),
        (SchedulerConfig, "preemption_mode", "drop", "recompute, swap, got 'drop'"),
        (SchedulerConfig, "preemption_immunity_steps", -1, "at least 0, got -1"),
        (SchedulerConfig, "max_look_past", -1, "at least 0, got -1"),
        (SchedulerConfig, "max_look_past", 2**31, "at most 2147483647, got 2147483648"),
        (SchedulerConfig, "max_times_passed", 1.5, "integer"),
        (
            CacheConfig,
            "prefix_caching_hash_algo",
            "md5",
            "builtin, sha256, sha256_cbor, xxhash, xxhash_cbor, got 'md5'",
        ),
        (CacheConfig, "swap_space", -1, "at least 0 and less than"),
        (CacheConfig, "swap_space", float("inf"), "got inf"),
        (CacheConfig, "swap_space", "4", "number, got '4'"),
        (ParallelConfig, "pipeline_parallel_size", 65, "at most 64"),
        (DeviceConfig, "device", "tpu", "cpu, cuda, got 'tpu'"),
        (LoadConfig, "quantization", "hqq", "int8-g128, int4-g32, int4-g64, int4-g128, gguf, awq, gptq, .*, got 'hqq'"),
        (DeviceConfig, "attention_backend", "flash", "auto, triton, cpu, torch, got 'flash'"),
        (DeviceConfig, "cpu_threads", 0, "at least 1, got 0"),
        (DeviceConfig, "cpu_threads", 1025, "at most 1024, got 1025"),
        (DeviceConfig, "cpu_threads", "2", "integer"),
        (LoadConfig, "load_format", "pt", "got 'pt'"),
    ],
)
def test_parts_name_value_and_limit(part, name, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        part(**{name: value})
    assert name in str(caught.value)


def test_budget_below_requests_names_both():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(8\) must be at least max_num_seqs \(9\)"):
        SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"seed": 2**63}, "seed"),
        ({"vocab_size": -1}, "vocab_size"),
    ],
)
def test_model_config(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**MODEL, **changes})


def test_model_is_named_after_itself_and_read_only():
    model = ModelConfig(**MODEL, hf_config={"a": 1})
    assert model.served_model_name == ("m",)
    with pytest.raises(TypeError):
        model.hf_config["a"] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.model = "x"


def test_without_chunked_prefill_the_longest_prompt_must_fit_a_step():
    scheduler = SchedulerConfig(max_num_batched_tokens=99, max_num_seqs=1, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match=r"\(99\) must be at least max_model_len \(100\)"):
        EngineConfig(model=ModelConfig(**MODEL), scheduler=scheduler)


@pytest.mark.parametrize(
    ("name", "runs", "shown"),
    [
        ("builtin", "siphash13", "hash: SipHash-1-3, 128 bits, keyed"),
        ("sha256", "sha256", "hash for sha256: SHA-256, the first 128 bits, keyed"),
        ("sha256_cbor", "sha256", "hash for sha256_cbor: SHA-256, the first 128 bits, keyed"),
        ("xxhash", "siphash13", "hash for xxhash: SipHash-1-3, 128 bits, keyed"),
        ("xxhash_cbor", "siphash13", "hash for xxhash_cbor: SipHash-1-3, 128 bits, keyed"),
    ],
)
def test_names_of_hash_functions(name, runs, shown):
    cache = CacheConfig(prefix_caching_hash_algo=name)
    assert cache.hash_algorithm == runs
    lines = describe_engine(EngineConfig(model=ModelConfig(**MODEL), cache=cache), 11)
    assert any(line.startswith("KV cache    10 blocks of 16 tokens") and line.endswith(f"({shown})") for line in lines)
    core = _core.SchedulerConfig(num_blocks=11, max_model_len=100, hash_algorithm=cache.hash_algorithm)
    assert core.hash_algorithm == runs


def test_to_swap_takes_swap_space():
    scheduler, cache = SchedulerConfig(preemption_mode="swap"), CacheConfig(swap_space=0)
    with pytest.raises(ConfigError, match="preemption_mode is swap, but swap_space is 0 GiB"):
        EngineConfig(model=ModelConfig(**MODEL), scheduler=scheduler, cache=cache)
    EngineConfig(model=ModelConfig(**MODEL), cache=cache)
    EngineConfig(model=ModelConfig(**MODEL), scheduler=scheduler)


@pytest.mark.parametrize(("num_blocks", "fits"), [(8, True), (7, False), (2, False)])
def test_a_pool_too_small_says_what_fits(num_blocks, fits):
    config = EngineConfig(model=ModelConfig(**MODEL))  # 100 tokens: 7 blocks of 16 and the null block
    if fits:
        config.check_num_blocks(num_blocks)
        return
    with pytest.raises(ConfigError, match=f"set max_model_len to {(num_blocks - 1) * 16} or less"):
        config.check_num_blocks(num_blocks)


@pytest.mark.parametrize(
    ("device", "named", "other"),
    [
        ("cpu", "cpu_kv_cache_fraction", "gpu_memory_utilization"),
        ("cuda", "gpu_memory_utilization", "cpu_kv_cache_fraction"),
    ],
)
def test_a_pool_too_small_names_the_share_of_its_device(device, named, other):
    config = EngineConfig(model=ModelConfig(**MODEL), device=DeviceConfig(device=device))
    with pytest.raises(ConfigError, match=f"or {named}$") as caught:
        config.check_num_blocks(2)
    assert other not in str(caught.value)


def test_override_is_checked_when_the_configuration_is_built():
    with pytest.raises(ConfigError, match="needs 7"):
        EngineConfig(model=ModelConfig(**MODEL), cache=CacheConfig(num_gpu_blocks_override=4))


def test_the_cores_attention_is_for_the_cpu():
    with pytest.raises(ConfigError, match="attention_backend is cpu, but device is cuda: set attention_backend to"):
        DeviceConfig(device="cuda", attention_backend="cpu")


def test_triton_on_the_cpu_is_for_tests_alone(monkeypatch):
    with pytest.raises(ConfigError, match="attention_backend is triton, but device is cpu"):
        DeviceConfig(attention_backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert DeviceConfig(attention_backend="triton").attention_backend == "triton"
    assert DeviceConfig(device="cuda", attention_backend="triton").device == "cuda"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            DeviceConfig(),
            "kv_cache_dtype is fp8, which only works on CUDA, but device is cpu: .* to bfloat16, int8_per_token_head",
        ),
        (
            DeviceConfig(device="cuda", attention_backend="torch"),
            "kv_cache_dtype is fp8, which attention_backend torch does not support: set attention_backend to triton or",
        ),
    ],
)
def test_a_cache_of_eight_bits_is_for_triton(device, message):
    cache = CacheConfig(kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model=ModelConfig(**MODEL), cache=cache, device=device)
    for device in (DeviceConfig(device="cuda"), DeviceConfig(device="cuda", attention_backend="triton")):
        config = EngineConfig(model=ModelConfig(**MODEL), cache=cache, device=device)
        assert config.cache.is_fp8
        assert any("in eight bits (e4m3)" in line for line in describe_engine(config, 11))
    with pytest.raises(
        ConfigError,
        match="kv_cache_dtype must be one of auto, bfloat16, int8_per_token_head, fp8, fp8_e4m3, got 'int4'",
    ):
        CacheConfig(kv_cache_dtype="int4")


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        (
            DeviceConfig(attention_backend="torch"),
            "float32",
            "kv_cache_dtype is bfloat16, which attention_backend torch does not support: set attention_backend to cpu",
        ),
        (
            DeviceConfig(),
            "float16",
            "bfloat16, which on cpu needs a model in bfloat16 or float32, but dtype is float16: set dtype to bfloat16",
        ),
        (
            DeviceConfig(device="cuda"),
            "float16",
            "kv_cache_dtype is bfloat16, which on cuda needs a model in bfloat16, but dtype is float16: set dtype to b",
        ),
    ],
)
def test_a_cache_of_bfloat16_is_for_the_core(device, dtype, message):
    cache = CacheConfig(kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model=ModelConfig(**MODEL, dtype=dtype), cache=cache, device=device)
    for fitting, dtype in [
        (DeviceConfig(), "auto"),
        (DeviceConfig(), "float32"),
        (DeviceConfig(attention_backend="cpu"), "bfloat16"),
        (DeviceConfig(attention_backend="torch"), "bfloat16"),
        (DeviceConfig(device="cuda"), "bfloat16"),
        (DeviceConfig(device="cuda"), "auto"),
    ]:
        config = EngineConfig(model=ModelConfig(**MODEL, dtype=dtype), cache=cache, device=fitting)
        assert not config.cache.is_fp8
        assert any(", in bfloat16" in line for line in describe_engine(config, 11))


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        (
            DeviceConfig(attention_backend="torch"),
            "bfloat16",
            "kv_cache_dtype is int8_per_token_head, which attention_backend torch does not support: .* to cpu or auto",
        ),
        (
            DeviceConfig(),
            "float16",
            "which on cpu needs a model in bfloat16 or float32, but dtype is float16: set dtype",
        ),
        (
            DeviceConfig(device="cuda"),
            "auto",
            "is int8_per_token_head, which only works on the CPU, but device is cuda: set kv_cache_dtype to fp8",
        ),
    ],
)
def test_a_cache_of_int8_is_for_the_core(device, dtype, message):
    cache = CacheConfig(kv_cache_dtype="int8_per_token_head")
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model=ModelConfig(**MODEL, dtype=dtype), cache=cache, device=device)
    for dtype in ("auto", "float32", "bfloat16"):
        config = EngineConfig(model=ModelConfig(**MODEL, dtype=dtype), cache=cache)
        assert not config.cache.is_fp8
        assert any(", in eight bits (a scale for" in line for line in describe_engine(config, 11))


def test_named_sizes_of_graphs_need_a_backend_that_has_graphs():
    graphs, model = CUDAGraphConfig(capture_sizes=(1, 2)), ModelConfig(**MODEL)
    with pytest.raises(
        ConfigError, match=r"capture_sizes is set, but attention_backend is torch, .* to triton or auto"
    ):
        EngineConfig(model=model, device=DeviceConfig(device="cuda", attention_backend="torch"), cuda_graphs=graphs)
    for device in (DeviceConfig(device="cuda"), DeviceConfig(device="cuda", attention_backend="triton")):
        assert EngineConfig(model=model, device=device, cuda_graphs=graphs).cuda_graphs.capture_sizes == (1, 2)


def test_what_the_cores_products_are_needed_for_is_for_the_cpu():
    with pytest.raises(
        ConfigError, match=r"batch_invariant is set, but attention_backend is torch, .* to triton or auto"
    ):
        DeviceConfig(device="cuda", attention_backend="torch", batch_invariant=True)
    assert DeviceConfig(device="cuda", batch_invariant=True).batch_invariant
    with pytest.raises(
        ConfigError, match=r"quantization is int8-g64, .* but device is cuda: leave quantization out, or set"
    ):
        EngineConfig(
            model=ModelConfig(**MODEL), device=DeviceConfig(device="cuda"), load=LoadConfig(quantization="int8-g64")
        )


def test_threads_of_the_cpu_are_for_the_cpu():
    with pytest.raises(ConfigError, match="cpu_threads is 2, but device is cuda: only the CPU uses it"):
        DeviceConfig(device="cuda", cpu_threads=2)
