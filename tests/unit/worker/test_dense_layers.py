"""What flags and environment ask of the dense layers, and how much may be kept twice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import GPT2, LLAMA

from rustvllm import _core
from rustvllm.config import EngineConfig, LoadConfig, ModelConfig
from rustvllm.exceptions import ConfigError
from rustvllm.layers.cpu.linear import CoreLinear, OneDnnLinear
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.linear import Linear
from rustvllm.model_loader import load_model
from rustvllm.worker.dense_layers import linear_options, make_linear_packer


@pytest.mark.parametrize(
    ("quantization", "batch_invariant", "forced", "expected"),
    [
        (None, False, "", LinearOptions()),
        (None, True, "", LinearOptions("core", matrix_unit=False)),
        (None, True, "core", LinearOptions("core", matrix_unit=False)),
        (None, False, "Torch", LinearOptions("torch")),
        ("int8", False, "", LinearOptions("core", "int8")),
        ("int8-g64", True, "core", LinearOptions("core", "int8", 64, matrix_unit=False)),
    ],
)
@pytest.mark.parametrize("activations", ["float", "INT8"])
def test_options(monkeypatch, quantization, batch_invariant, forced, expected, activations):
    monkeypatch.setenv("RUSTVLLM_LINEAR_KERNEL", forced)
    monkeypatch.setenv("RUSTVLLM_ACTIVATIONS", activations)
    expected = replace(expected, round_activations=activations == "INT8")
    assert linear_options(quantization, torch.float32, batch_invariant=batch_invariant) == expected


def test_activations_are_rounded_by_default(monkeypatch):
    monkeypatch.delenv("RUSTVLLM_LINEAR_KERNEL", raising=False)
    monkeypatch.delenv("RUSTVLLM_ACTIVATIONS", raising=False)
    for quantization in ("int8", "gguf", None):
        for batch_invariant in (False, True):
            options = linear_options(quantization, torch.float32, batch_invariant=batch_invariant)
            assert options.round_activations
            assert options.packed_kind == ("w8a8" if quantization == "int8" else None)
    options = linear_options("int4-g64", torch.float32, batch_invariant=False)
    assert (options.packed_kind, options.group_size, options.form.bits) == ("w4a8", 64, 4)


def test_unknown_instructions_are_refused(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_CPU_INSTRUCTIONS", "sse2")
    with pytest.raises(ConfigError, match=r"RUSTVLLM_CPU_INSTRUCTIONS must be one of portable, avx2, .*, got 'sse2'"):
        linear_options(None, torch.float32, batch_invariant=False)


@pytest.mark.parametrize("streams", ["0", "3", "one"])
def test_another_number_of_streams_is_refused(streams, monkeypatch):
    monkeypatch.setenv("RUSTVLLM_CPU_STREAMS", streams)
    with pytest.raises(ConfigError, match=f"RUSTVLLM_CPU_STREAMS must be 1 or 2, got '{streams}'"):
        linear_options(None, torch.float32, batch_invariant=False)


def test_an_unknown_kind_of_activations_is_refused(monkeypatch):
    monkeypatch.setenv("RUSTVLLM_ACTIVATIONS", "int4")
    with pytest.raises(ConfigError, match="RUSTVLLM_ACTIVATIONS must be one of float, int8, got 'int4'"):
        linear_options("int8", torch.float32, batch_invariant=False)


@pytest.mark.parametrize(
    ("forced", "quantization", "batch_invariant", "dtype", "message"),
    [
        ("mkl", None, False, torch.float32, "RUSTVLLM_LINEAR_KERNEL must be one of torch, onednn, core, got 'mkl'"),
        ("torch", "int8", False, torch.float32, "is torch, but quantization int8 needs the core's kernels: unset"),
        ("onednn", None, True, torch.bfloat16, "is onednn, but batch_invariant needs the core's kernels: unset"),
        ("onednn", None, False, torch.float16, "has no oneDNN products in float16: unset the variable"),
        ("core", None, False, torch.float16, "but dtype is float16: unset the variable, or set dtype"),
    ],
)
def test_contradictions(monkeypatch, forced, quantization, batch_invariant, dtype, message):
    monkeypatch.setenv("RUSTVLLM_LINEAR_KERNEL", forced)
    with pytest.raises(ConfigError, match=message):
        linear_options(quantization, dtype, batch_invariant=batch_invariant)


def load(base, architecture, *, dtype=torch.float32, quantization=None, available=1 << 40):
    """A model with random weights, loaded as a worker does it, and its packer."""
    config = EngineConfig(
        model=ModelConfig(
            model="m", path=Path("/nowhere"), hf_config=base, architecture=architecture, max_model_len=64,
            vocab_size=97, hidden_size=32, num_layers=3, num_attention_heads=4, num_kv_heads=2, head_dim=8,
        ),
        load=LoadConfig(load_format="dummy", quantization=quantization),
    )  # fmt: skip
    threads = _core.CpuThreads(1)

    def make_packer(outline):
        assert outline.embed_tokens.weight.is_meta
        return make_linear_packer(config, outline, dtype, threads)

    return load_model(config.model, config.load, dtype, torch.device("cpu"), available, make_packer)


@pytest.mark.parametrize(
    "kernel",
    [name for name in ("torch", "onednn", "core") if name != "onednn" or OneDnnLinear.is_available(torch.float32)],
)
@pytest.mark.parametrize(("base", "architecture"), [(GPT2, "GPT2LMHeadModel"), (LLAMA, "LlamaForCausalLM")])
def test_a_model_gives_the_same_logits_with_every_kernel(monkeypatch, kernel, base, architecture):
    hidden = torch.randn((7, base.get("n_embd") or base["hidden_size"]), generator=torch.Generator().manual_seed(0))
    monkeypatch.delenv("RUSTVLLM_LINEAR_KERNEL", raising=False)
    plain = load(base, architecture)
    monkeypatch.setenv("RUSTVLLM_LINEAR_KERNEL", kernel)
    model = load(base, architecture)
    torch.testing.assert_close(model.compute_logits(hidden), plain.compute_logits(hidden), atol=1e-5, rtol=1e-5)
    linears = [(a, b) for a, b in zip(model.modules(), plain.modules(), strict=True) if isinstance(a, Linear)]
    assert linears
    for ours, theirs in linears:
        x = torch.randn((3, ours.weight.shape[1]), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_int8_is_packed_while_loading_and_needs_less_memory(monkeypatch):
    monkeypatch.delenv("RUSTVLLM_LINEAR_KERNEL", raising=False)
    model = load(LLAMA, "LlamaForCausalLM", quantization="int8")
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert linears
    assert all(isinstance(linear.kernel, CoreLinear) and linear.weight.is_meta for linear in linears)
    plain = sum(parameter.nbytes for parameter in load(LLAMA, "LlamaForCausalLM").parameters())
    load(LLAMA, "LlamaForCausalLM", quantization="int8", available=plain * 3 // 4)
    with pytest.raises(Exception, match="are free on cpu"):
        load(LLAMA, "LlamaForCausalLM", available=plain * 3 // 4)
