"""Which backend is chosen, and what is said when Triton's cannot be."""

import logging
import re
import sys

import pytest
import torch

from rustvllm.attention import selector
from rustvllm.attention.metadata import KVCacheSpec
from rustvllm.attention.selector import make_attention_backend
from rustvllm.exceptions import ModelLoadError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPEC = KVCacheSpec(1, 2, 8)


@pytest.fixture
def without_triton(monkeypatch):
    """As where it is not installed."""
    monkeypatch.setattr(selector.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_triton")
def test_without_triton_a_gpu_takes_torch_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="rustvllm"):
        assert make_attention_backend("auto", SPEC, torch.float16, CUDA, 1).name == "torch"
    assert "the package triton is not installed" in caplog.text


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("triton", {}, r"attention_backend is triton, but the package triton is not installed \(pip install triton\)"),
        ("auto", {"cache_dtype": torch.uint8}, "kv_cache_dtype is fp8, .* but the package triton is not installed"),
        (
            "auto",
            {"batch_invariant": True},
            "batch_invariant is set, which on a GPU needs Triton's kernels, but the pack",
        ),
        ("torch", {"cache_dtype": torch.uint8}, "kv_cache_dtype is fp8, .* but the package triton is not installed"),
    ],
)
def test_without_triton_asking_for_it_is_an_error(name, kwargs, message):
    with pytest.raises(ModelLoadError, match=message):
        make_attention_backend(name, SPEC, torch.float16, CUDA, 1, **kwargs)
    assert make_attention_backend("torch", SPEC, torch.float16, CUDA, 1).name == "torch"


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_smaller_cache_is_for_the_core(name):
    for dtype, cache_dtype in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.int8),
    ):
        assert make_attention_backend(name, SPEC, dtype, CPU, 1, cache_dtype=cache_dtype).name == "cpu"
    assert make_attention_backend("torch", SPEC, torch.bfloat16, CPU, 1, cache_dtype=torch.bfloat16).name == "torch"


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [("torch", torch.float32, CPU), ("auto", torch.float16, CPU), ("auto", torch.float16, CUDA)],
)
@pytest.mark.parametrize(("cache_dtype", "called"), [(torch.bfloat16, "bfloat16"), (torch.int8, "int8_per_token_head")])
def test_a_smaller_cache_that_nothing_reads_is_refused(name, dtype, device, cache_dtype, called):
    told = f"kv_cache_dtype is {called}, but on {device.type} a model in {str(dtype)[6:]} needs a KV cache in"
    with pytest.raises(ModelLoadError, match=told):
        make_attention_backend(name, SPEC, dtype, device, 1, cache_dtype=cache_dtype)


def test_the_kernels_do_not_run_on_the_cpu():
    with pytest.raises(ModelLoadError, match="device is cpu, where its kernels only run under TRITON_INTERPRET=1"):
        make_attention_backend("triton", SPEC, torch.float32, CPU, 1)


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        (KVCacheSpec(1, 2, 257), torch.float16, "at most 256 features and the model's have 257"),
        (SPEC, torch.float64, "not in torch.float64"),
    ],
)
def test_models_that_the_kernels_do_not_serve(spec, dtype, message):
    with pytest.raises(ModelLoadError, match=message):
        make_attention_backend("triton", spec, dtype, CUDA, 1)
    assert make_attention_backend("auto", spec, dtype, CUDA, 1).name == "torch"


def test_other_backends_do_not_import_triton():
    loaded = {name for name in sys.modules if name.partition(".")[0] == "triton"}
    make_attention_backend("auto", SPEC, torch.float32, CPU, 1)
    make_attention_backend("torch", SPEC, torch.float32, CPU, 1)
    assert {name for name in sys.modules if name.partition(".")[0] == "triton"} == loaded


def test_without_a_compiler_the_log_says_what_to_install(monkeypatch, caplog):
    from rustvllm.kernels import tuning
    from rustvllm.layers import fused

    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    tuning.why_no_toolchain.cache_clear()
    fused._runs_fused.cache_clear()
    monkeypatch.setattr(tuning.triton.runtime, "driver", Driver())
    monkeypatch.setattr(tuning, "capability", lambda device: (9, 0))
    try:
        with caplog.at_level("WARNING"):
            assert make_attention_backend("auto", SPEC, torch.float16, CUDA, 1).name == "torch"
        assert "Failed to find C compiler" in caplog.text
        assert re.search(r"apt-get install gcc python3\.\d+-dev", caplog.text)
        assert not fused._runs_fused(CUDA), "layers run by torch, too"
        with pytest.raises(ModelLoadError, match="it needs a C compiler and the headers of Python 3"):
            make_attention_backend("triton", SPEC, torch.float16, CUDA, 1)
    finally:
        tuning.why_no_toolchain.cache_clear()
        fused._runs_fused.cache_clear()
