"""How many KV blocks a worker offers, how it takes their memory, which dtype and threads it chooses."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from checkpoints import GPT2, LLAMA
from fake_streams import FakeRecorder, StaticTorchBackend
from naive_schedule import FLOAT_COLUMNS, INT_COLUMNS, buffer_spec

from rustvllm.config import CacheConfig, CUDAGraphConfig, LoadConfig
from rustvllm.config.parallel import ParallelConfig
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.worker import host_resources
from rustvllm.worker import worker as worker_module
from rustvllm.worker.graphs.recorder import CannotCaptureError
from rustvllm.worker.memory import kv_cache
from rustvllm.worker.memory.kv_cache import step_bytes
from rustvllm.worker.memory.profile_run import profile_run
from rustvllm.worker.worker import Worker, resolve_dtype

BYTES_PER_BLOCK = 2 * 3 * 16 * 32 * 4  # keys and values, layers, tokens, heads x head_dim, float32


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)

    def make(
        *,
        architecture="GPT2LMHeadModel",
        max_model_len=128,
        dtype="auto",
        device="cpu",
        preemption_mode="recompute",
        cpu_threads=None,
        **cache,
    ):
        base = GPT2 if architecture.startswith("GPT2") else LLAMA
        options = {
            "block_size": 16,
            "cpu_kv_cache_fraction": 0.2,
            "gpu_memory_utilization": 0.9,
            "kv_cache_memory_bytes": None,
            "num_gpu_blocks_override": None,
            "swap_space": 4.0,
            "kv_cache_dtype": "auto",
        }
        config = SimpleNamespace(
            model=SimpleNamespace(
                model="m", path=tmp_path, hf_config=base, architecture=architecture, dtype=dtype, seed=0,
                max_model_len=max_model_len, model_impl="rustvllm", logits_processors=(), logprobs_mode="raw_logprobs",
                hidden_size=32, vocab_size=100, config_file=None, pooler=None, vision=None,
            ),
            cache=CacheConfig(**(options | cache)),
            scheduler=SimpleNamespace(
                max_num_seqs=8, max_num_batched_tokens=256, preemption_mode=preemption_mode, async_scheduling=False
            ),
            parallel=ParallelConfig(),
            device=SimpleNamespace(
                device=device, attention_backend="auto", batch_invariant=False, cpu_threads=cpu_threads
            ),
            cuda_graphs=CUDAGraphConfig(),
            load=LoadConfig(load_format="dummy"),
            lora=None,
            draft_model=None,
            speculation=None,
        )  # fmt: skip
        worker = Worker(config, FLOAT_COLUMNS, INT_COLUMNS)
        worker.load_model()
        return worker

    return make


def memory(monkeypatch, limit, available):
    monkeypatch.setattr(host_resources, "memory_limit", lambda: limit)
    monkeypatch.setattr(host_resources, "memory_available", lambda: available)


def test_bytes_per_block(make):
    assert make().num_bytes_per_block == BYTES_PER_BLOCK
    assert make(dtype="bfloat16").num_bytes_per_block == BYTES_PER_BLOCK // 2
    assert make(kv_cache_dtype="bfloat16").num_bytes_per_block == BYTES_PER_BLOCK // 2


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "num_blocks", "head_len"),
    [("auto", torch.float32, 10, 8), ("bfloat16", torch.bfloat16, 20, 8), ("int8_per_token_head", torch.int8, 26, 12)],
)
def test_a_smaller_cache_holds_more_tokens(make, kv_cache_dtype, dtype, num_blocks, head_len):
    worker = make(kv_cache_memory_bytes=10 * BYTES_PER_BLOCK, kv_cache_dtype=kv_cache_dtype)
    assert worker.determine_num_blocks() == num_blocks
    worker.initialize_kv_cache(num_blocks, buffer_spec(8, 256, 8), 2)
    caches = worker.runner.kv_caches
    assert {(cache.dtype, cache.shape[-1]) for cache in caches} == {(dtype, head_len)}
    assert sum(cache.nbytes for cache in caches) == num_blocks * worker.num_bytes_per_block
    assert worker.dtype == torch.float32


def test_a_cache_of_eight_bits_is_for_triton(make):
    with pytest.raises(
        ModelLoadError, match=("kv_cache_dtype is fp8, which only Triton's kernels support, but device is")
    ):
        make(kv_cache_dtype="fp8")


def test_the_override_is_taken_as_it_is(make):
    assert make(num_gpu_blocks_override=7).determine_num_blocks() == 7


def test_memory_bytes_are_divided_into_blocks(make):
    assert make(kv_cache_memory_bytes=10 * BYTES_PER_BLOCK + 5).determine_num_blocks() == 10


def test_cpu_takes_a_fraction_of_the_limit_within_what_is_free(make, monkeypatch):
    worker = make(cpu_kv_cache_fraction=0.5, max_model_len=128)
    memory(monkeypatch, 100 * BYTES_PER_BLOCK, 1000 * BYTES_PER_BLOCK)
    assert worker.determine_num_blocks() == 50
    memory(monkeypatch, 100 * BYTES_PER_BLOCK, 20 * BYTES_PER_BLOCK)
    assert worker.determine_num_blocks() == 18
    # A tiny model does not reserve gigabytes: 4 x max_num_seqs sequences of max_model_len, and the null block.
    memory(monkeypatch, 1 << 50, 1 << 50)
    assert worker.determine_num_blocks() == 1 + 4 * 8 * 8


def test_the_default_cache_leaves_what_the_largest_step_takes(make, monkeypatch):
    worker = make(cpu_kv_cache_fraction=1.0)
    step = step_bytes(worker.config.model, worker.config.scheduler, 4)
    assert step > 32 << 20
    monkeypatch.setattr(kv_cache, "CPU_CACHE_CAP", 1 << 30)
    memory(monkeypatch, 1 << 40, 2 * step)
    assert worker.determine_num_blocks() == step // BYTES_PER_BLOCK


@pytest.mark.parametrize("option", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_a_cache_that_leaves_no_room_for_a_step_is_said_to_be_tight(make, monkeypatch, caplog, option):
    unit = 1 if option == "kv_cache_memory_bytes" else BYTES_PER_BLOCK
    worker = make(**{option: 40 * BYTES_PER_BLOCK // unit})
    step = step_bytes(worker.config.model, worker.config.scheduler, 4)
    memory(monkeypatch, 1 << 40, 41 * BYTES_PER_BLOCK + step)
    assert worker.determine_num_blocks() == 40
    assert "memory is tight" not in caplog.text
    memory(monkeypatch, 1 << 40, 39 * BYTES_PER_BLOCK + step)
    assert worker.determine_num_blocks() == 40
    assert "memory is tight" in caplog.text
    assert (
        f"kv_cache_memory_bytes (to {39 * BYTES_PER_BLOCK}, for example), max_num_batched_tokens (256)"
    ) in caplog.text


def test_too_little_memory_names_the_numbers(make, monkeypatch):
    worker = make(kv_cache_memory_bytes=BYTES_PER_BLOCK)
    with pytest.raises(ModelLoadError, match=rf"has {BYTES_PER_BLOCK} bytes, .* need {2 * BYTES_PER_BLOCK}"):
        worker.determine_num_blocks()


def test_too_little_memory_on_the_cpu_names_its_share(make, monkeypatch):
    worker = make()
    memory(monkeypatch, BYTES_PER_BLOCK, 1 << 40)
    with pytest.raises(ModelLoadError, match="raise kv_cache_memory_bytes or cpu_kv_cache_fraction, or lower"):
        worker.determine_num_blocks()


def test_more_than_there_is_names_what_would_fit(make, monkeypatch):
    worker = make(num_gpu_blocks_override=1000)
    memory(monkeypatch, 1 << 40, 30 * BYTES_PER_BLOCK + 1)
    with pytest.raises(ModelLoadError, match=r"num_gpu_blocks_override is 1000, .* set it to 30 or less"):
        worker.determine_num_blocks()
    worker = make(kv_cache_memory_bytes=10**9)
    with pytest.raises(ModelLoadError, match="kv_cache_memory_bytes is 1000000000"):
        worker.determine_num_blocks()
    worker = make(num_gpu_blocks_override=2**31 - 1)
    with pytest.raises(ModelLoadError, match="the limit is 134217727 blocks"):
        worker.determine_num_blocks()


def gib(blocks):
    return blocks * BYTES_PER_BLOCK / 2**30


def test_swap_space_is_divided_into_blocks_and_only_used_to_swap(make, monkeypatch):
    assert make(swap_space=gib(10.5)).determine_num_cpu_blocks(20) == 0
    worker = make(preemption_mode="swap", swap_space=gib(10.5))
    assert worker.determine_num_cpu_blocks(20) == 10
    worker.initialize_kv_cache(20, buffer_spec(8, 256, 8), 2, 10)
    cpu_caches = worker.runner.block_copier.cpu_caches
    assert [tuple(cache.shape) for cache in cpu_caches] == [(2, 10, 16, 4, 8)] * 3
    assert all(cache.device.type == "cpu" and cache.dtype == torch.float32 for cache in cpu_caches)


def test_swap_space_in_addition_to_the_cache_must_be_there(make, monkeypatch):
    memory(monkeypatch, 1 << 50, 1 << 40)
    worker = make(preemption_mode="swap", swap_space=gib(10))
    memory(monkeypatch, 1 << 50, 30 * BYTES_PER_BLOCK)
    assert worker.determine_num_cpu_blocks(20) == 10
    with pytest.raises(
        ConfigError, match=r"^swap_space is .* GiB, but 0.00 GiB of CPU memory are free after"
    ) as caught:
        worker.determine_num_cpu_blocks(24)
    # What the message says would work does.
    fits = float(re.search("set it to ([0-9.]+) or less", str(caught.value))[1])
    worker.config.cache = replace(worker.config.cache, swap_space=fits)
    assert worker.determine_num_cpu_blocks(24) >= 5
    with pytest.raises(ConfigError, match="free some, or set preemption_mode to recompute"):
        worker.determine_num_cpu_blocks(30)


def test_swap_space_below_one_block_says_how_much_it_takes(make):
    worker = make(preemption_mode="swap", swap_space=gib(0.5))
    with pytest.raises(ConfigError, match=f"one KV block takes {BYTES_PER_BLOCK} bytes") as caught:
        worker.determine_num_cpu_blocks(20)
    enough = float(re.search("at least ([0-9.]+),", str(caught.value))[1])
    assert make(preemption_mode="swap", swap_space=enough).determine_num_cpu_blocks(20) == 1


def test_a_model_that_does_not_fit_is_refused(make, monkeypatch):
    memory(monkeypatch, 1 << 40, 1000)
    with pytest.raises(ModelLoadError, match="but 1000 bytes are free on cpu"):
        make()


def test_the_cache_is_zero_and_takes_memory_only_where_it_is_used(make):
    num_blocks = (256 << 20) // BYTES_PER_BLOCK
    growth = []
    for _ in range(3):  # what other tests left to threads and to the collector may grow in the same moment
        worker = make()
        before = psutil.Process().memory_info().rss
        sets = worker.initialize_kv_cache(num_blocks, buffer_spec(8, 256, 8), 2)
        growth.append(psutil.Process().memory_info().rss - before)
        if growth[-1] < 64 << 20:
            break
    assert min(growth) < 64 << 20
    caches = worker.runner.kv_caches
    assert [tuple(cache.shape) for cache in caches] == [(2, num_blocks, 16, 4, 8)] * 3
    assert not caches[2][:, -1].any()
    assert len(sets) == 2
    assert all(isinstance(array, np.ndarray) for array in sets[0].values())
    sets[1]["input_ids"][0] = 5
    assert worker.runner.step_buffers[1].tensors["input_ids"][0] == 5
    worker.shutdown()
    with pytest.raises(RuntimeError, match="load_model"):
        worker.determine_num_blocks()


@pytest.mark.parametrize(
    ("dtype", "device", "stored", "expected"),
    [
        ("auto", "cpu", {"dtype": "bfloat16"}, torch.float32),
        ("auto", "cuda", {"dtype": "bfloat16"}, torch.bfloat16),
        ("auto", "cuda", {"torch_dtype": "float32"}, torch.float16),
        ("auto", "cuda", {}, torch.float16),
        ("bfloat16", "cpu", {}, torch.bfloat16),
    ],
)
def test_dtypes(dtype, device, stored, expected):
    assert resolve_dtype(dtype, torch.device(device), stored) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_clear_error(make):
    with pytest.raises(ModelLoadError, match=r"finds no CUDA device: .*To run on the CPU instead, use --device cpu"):
        make(device="cuda")


@pytest.mark.parametrize(("limit", "expected"), [(1 << 40, 1), (1, 3)])
def test_small_models_run_on_one_thread(make, monkeypatch, limit, expected):
    chosen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(worker_module, "SINGLE_THREAD_BYTES", limit)
    monkeypatch.setattr(host_resources, "num_compute_threads", lambda: 3)
    worker = make()
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    worker._set_num_threads(worker.runner.model)
    assert chosen == [expected]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    worker._set_num_threads(worker.runner.model)
    assert chosen == [expected], "what the user says stands"


@pytest.mark.parametrize("of_the_environment", [None, "2"])
def test_as_many_threads_compute_as_the_flag_says(make, monkeypatch, of_the_environment):
    chosen = [1]
    if of_the_environment is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", of_the_environment)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    worker = make(cpu_threads=3)
    assert chosen == [1, 3]
    assert worker._threads.num_threads == 3


def test_the_largest_batch_is_within_the_limits(make):
    worker = make(max_model_len=20)
    lens = worker._largest_batch()
    assert len(lens) == 8
    assert max(lens) == 20
    profile_run(worker.runner, lens, torch.float32)


@pytest.mark.gpu
def test_blocks_on_a_gpu_leave_room_for_the_largest_step(make):
    worker = make(device="cuda", gpu_memory_utilization=0.3)
    num_blocks = worker.determine_num_blocks()
    total = torch.cuda.mem_get_info()[1]
    assert 0 < num_blocks * worker.num_bytes_per_block < 0.3 * total
    worker.initialize_kv_cache(min(num_blocks, 1000), buffer_spec(8, 256, 8), 2)


def test_graphs_are_made_where_device_and_attention_have_them(make, monkeypatch, caplog):
    worker = make()
    worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
    assert worker.runner.graphs is None, "not on the CPU"
    worker.capture_graphs()
    monkeypatch.setattr(worker_module, "make_graph_recorder", lambda device: FakeRecorder())
    with caplog.at_level("INFO"):
        worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
    assert worker.runner.graphs is None
    assert "CUDA graphs: none, because attention by cpu cannot be captured" in caplog.text
    worker.runner.backend = StaticTorchBackend(worker.runner.model.kv_cache_spec, torch.float32)
    for config, sizes in ((CUDAGraphConfig(), [1, 2, 4, 8]), (CUDAGraphConfig(capture_sizes=(5, 3, 5)), [3, 5])):
        worker.config.cuda_graphs = config
        worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
        assert worker.runner.graphs.decodes.sizes == sizes
        assert worker.runner.graphs.mixed.sizes[-1].num_tokens == 256
    worker.config.cuda_graphs = CUDAGraphConfig(max_mixed_tokens=0)
    worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
    assert worker.runner.graphs.mixed is None
    worker.config.cuda_graphs = CUDAGraphConfig(capture_sizes=())
    worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
    assert worker.runner.graphs is None


@pytest.mark.parametrize(("mode", "captured"), [("ahead", 9), ("lazy", 0)])
def test_graphs_are_captured_ahead_or_when_they_are_needed(make, monkeypatch, caplog, mode, captured):
    worker, recorder = make(), FakeRecorder()
    monkeypatch.setattr(worker_module, "make_graph_recorder", lambda device: recorder)
    worker.runner.backend = StaticTorchBackend(worker.runner.model.kv_cache_spec, torch.float32)
    worker.config.cuda_graphs = CUDAGraphConfig(capture_mode=mode)
    worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
    with caplog.at_level("INFO"):
        worker.capture_graphs()
    assert len(recorder.graphs) == captured
    assert ("9 of 9 captured" if captured else "CUDA graphs: each is captured when it is first needed") in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("no 2 GiB"), r"CUDA graphs of up to 8 requests \(no 2 GiB\); lower gpu_memory_utiliz"),
        (CannotCaptureError("not permitted"), r"cannot run in a CUDA graph \(not permitted\); set enforce_eager"),
    ],
)
def test_a_capture_that_fails_ahead_says_what_would_work(make, monkeypatch, error, message):
    worker = make()
    recorder = SimpleNamespace(capture=lambda forward: (_ for _ in ()).throw(error))
    monkeypatch.setattr(worker_module, "make_graph_recorder", lambda device: recorder)
    worker.runner.backend = StaticTorchBackend(worker.runner.model.kv_cache_spec, torch.float32)
    worker.config.cuda_graphs = CUDAGraphConfig(capture_sizes=(8,))
    worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
    with pytest.raises(ModelLoadError, match=message):
        worker.capture_graphs()


def test_a_model_that_no_graph_takes_runs_without_unless_sizes_were_asked_for(make, monkeypatch, caplog):
    worker = make()
    recorder = SimpleNamespace(capture=lambda forward: (_ for _ in ()).throw(CannotCaptureError("not permitted")))
    monkeypatch.setattr(worker_module, "make_graph_recorder", lambda device: recorder)
    worker.runner.backend = StaticTorchBackend(worker.runner.model.kv_cache_spec, torch.float32)
    worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
    with caplog.at_level("WARNING"):
        worker.capture_graphs()
    assert "CUDA graphs: none, because the model cannot run in one (not permitted)" in caplog.text
    assert worker.runner.graphs is None
    worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
    assert worker.runner.graphs is None, "it is not tried again"


def test_out_of_memory_says_what_to_lower(make):
    error = make().out_of_memory(torch.OutOfMemoryError("tried 2 GiB\nmore"), "a step of 9 tokens of 2 requests")
    assert str(error) == (
        "cpu is out of memory in a step of 9 tokens of 2 requests (tried 2 GiB); lower gpu_memory_utilization (0.9) or "
        "kv_cache_memory_bytes, max_num_batched_tokens (256) or max_num_seqs (8)"
    )


def test_no_memory_for_the_cache_says_what_to_lower(make, monkeypatch):
    worker = make()

    def no_memory(shape):
        raise torch.OutOfMemoryError("tried 2 GiB")

    monkeypatch.setattr(worker, "_zeros", no_memory)
    with pytest.raises(ModelLoadError, match=r"in a KV cache of 10 blocks \(tried 2 GiB\); lower gpu_memory"):
        worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)


@pytest.mark.parametrize("what", ["StepBuffers", "make_graph_recorder"])
def test_no_memory_for_what_steps_read_says_what_to_lower(make, monkeypatch, what):
    def refuse(*args, **options):
        raise torch.OutOfMemoryError("no 155 MiB")

    worker = make()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(worker_module, what, refuse)
    with pytest.raises(ModelLoadError, match=r"read and leave \(no 155 MiB\); lower gpu_memory_utilization"):
        worker.initialize_kv_cache(10, buffer_spec(8, 256, 8), 2)
