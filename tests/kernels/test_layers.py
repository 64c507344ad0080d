"""Norms, rotary positions, gated activations and the batch-invariant product against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import DTYPES, TOLERANCES

from rustvllm.kernels import activation, matmul, norm, reference
from rustvllm.kernels import rotary as rotary_kernel
from rustvllm.layers import activation as activation_layer
from rustvllm.layers import norm as norm_layer
from rustvllm.layers import rotary as rotary_layer
from rustvllm.layers.activation import apply_gated, get_activation
from rustvllm.layers.norm import GemmaRMSNorm, RMSNorm
from rustvllm.layers.rotary import RotaryEmbedding, apply_rotary

SEEDS = st.integers(0, 2**31)
few = settings(max_examples=8, derandomize=True, deadline=None)


def draw_normal(seed, *shape, dtype, device):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype, device):
    @few
    @given(st.integers(0, 4), st.sampled_from([1, 7, 64, 100]), st.sampled_from([0.0, 1.0]), st.booleans(), SEEDS)
    def run(num_rows, hidden_size, offset, has_bias, seed):
        x, residual = draw_normal(seed, 2, num_rows, hidden_size, dtype=dtype, device=device)
        weight, bias = draw_normal(seed + 1, 2, hidden_size, dtype=dtype, device=device)
        bias = bias if has_bias else None
        total = x + residual
        rms = reference.rms_norm(x, weight, 1e-5, weight_offset=offset)
        assert_close(norm.rms_norm(x, weight, 1e-5, weight_offset=offset), rms)
        assert_close(norm.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))
        for out, expected in (
            (norm.add_rms_norm(x, residual, weight, 1e-5), reference.rms_norm(total, weight, 1e-5)),
            (norm.add_layer_norm(x, residual, weight, bias, 1e-5), reference.layer_norm(total, weight, bias, 1e-5)),
        ):
            assert_close(out[0], expected)
            assert torch.equal(out[1], total)

    run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_of_a_sum_with_a_norm(dtype, offset, device):
    """It has the bits of the kernels that it replaces."""
    for hidden_size in (7, 64):
        x, residual = draw_normal(hidden_size, 2, 3, hidden_size, dtype=dtype, device=device)
        post, weight = draw_normal(hidden_size + 1, 2, hidden_size, dtype=dtype, device=device)
        out, total = norm.norm_add_rms_norm(x, residual, post, weight, 1e-5, weight_offset=offset)
        assert torch.equal(total, residual + norm.rms_norm(x, post, 1e-5, weight_offset=offset))
        assert torch.equal(out, norm.rms_norm(total, weight, 1e-5, weight_offset=offset))
        assert_close(out, reference.rms_norm(total, weight, 1e-5, weight_offset=offset))


def filled(module, seed, dtype, device):
    for index, (name, parameter) in enumerate(module.named_parameters()):
        setattr(
            module, name, torch.nn.Parameter(draw_normal(seed + index, *parameter.shape, dtype=dtype, device=device))
        )
    return module


@pytest.mark.parametrize("kind", ["rms", "gemma, norm before", "gemma", "layer norm", "nothing", "plain"])
def test_layers_that_end_in_a_sum(monkeypatch, kind, device):
    """With kernels as without, and each in as few of them as there are."""
    made = {
        "rms": lambda: RMSNorm(48, 1e-5), "layer norm": lambda: norm_layer.LayerNorm(48, 1e-5),
        "nothing": lambda: None, "plain": lambda: norm_layer.PlainLayerNorm(48, 1e-5),
    }.get(kind, lambda: GemmaRMSNorm(48, 1e-5))  # fmt: skip
    norm_, post = made(), GemmaRMSNorm(48, 1e-5) if kind == "gemma, norm before" else None
    for module in (norm_, post):
        if module is not None:
            filled(module, 3, torch.float32, device)
    x, residual = draw_normal(11, 2, 5, 48, dtype=torch.float32, device=device)
    calls = []
    inner = norm._norm
    monkeypatch.setattr(norm, "_norm", lambda *args, **options: calls.append(1) or inner(*args, **options))
    got = norm_layer.add_norm(norm_, x, residual, post)
    assert len(calls) == (0 if kind in ("nothing", "plain") else 1)
    monkeypatch.setattr(norm_layer, "runs_fused", lambda _: False)
    expected = norm_layer.add_norm(norm_, x, residual, post)
    assert len(calls) <= 1
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(dtype, device):
    @few
    @given(
        st.integers(0, 3), st.integers(1, 5), st.sampled_from([(8, 4), (12, 6), (12, 2), (10, 3)]), st.booleans(), SEEDS
    )
    def run(num_tokens, num_heads, sizes, interleaved, seed):
        head_dim, num_pairs = sizes
        # As a model gives them: some heads out of more.
        x = draw_normal(seed, num_tokens, num_heads + 2, head_dim, dtype=dtype, device=device)[:, 1:-1]
        angles = draw_normal(seed + 1, num_tokens, num_pairs, dtype=torch.float32, device=device) * 3
        cos, sin = (torch.cat((part, part), 1).to(dtype)[:, num_pairs:] for part in (angles.cos(), angles.sin()))
        expected = reference.rotary(x, cos, sin, interleaved=interleaved)
        assert_close(rotary_kernel.rotary(x, cos, sin, interleaved=interleaved), expected)

    run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 40, 1500])
def test_gated_activations(dtype, size, device):
    x = draw_normal(1, 3, 2 * size + 5, dtype=dtype, device=device)[:, : 2 * size] * 4  # rows with a gap between them
    assert_close(activation.silu_and_mul(x), reference.silu_and_mul(x))
    for approximate in ("none", "tanh"):
        expected = reference.gelu_and_mul(x, approximate=approximate)
        assert_close(activation.gelu_and_mul(x, approximate=approximate), expected)
    assert activation.silu_and_mul(x[:0]).shape == (0, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype, device):
    @few
    @given(st.integers(0, 40), st.sampled_from([1, 20, 70]), st.sampled_from([1, 17, 40]), st.booleans(), SEEDS)
    def run(num_rows, in_features, out_features, has_bias, seed):
        x = draw_normal(seed, num_rows, in_features, dtype=dtype, device=device)
        weight = draw_normal(seed + 1, out_features, in_features, dtype=dtype, device=device) / in_features**0.5
        bias = draw_normal(seed + 2, out_features, dtype=dtype, device=device) if has_bias else None
        assert_close(matmul.linear(x, weight, bias), reference.linear(x, weight, bias))

    run()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_company(dtype, device):
    x = draw_normal(3, 37, 80, dtype=dtype, device=device)
    weight = draw_normal(4, 30, 80, dtype=dtype, device=device)
    together = matmul.linear(x, weight)
    for rows in ([0], [36], [5, 17, 2], list(range(20))):
        assert torch.equal(matmul.linear(x[rows], weight), together[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_products_on_a_gpu(dtype, device):
    weight = draw_normal(5, 14336, 4096, dtype=dtype, device=device) / 64
    x = draw_normal(6, 300, 4096, dtype=dtype, device=device)
    together = matmul.linear(x, weight)
    assert_close(together, reference.linear(x, weight))
    for num_rows in (1, 2, 16, 64, 65, 299):
        assert torch.equal(matmul.linear(x[:num_rows], weight), together[:num_rows])


def test_models_layers_take_the_kernels(device, monkeypatch):
    """What models are made of gives the same with them and without."""
    taken = []
    functions = (
        (norm, "rms_norm"),
        (rotary_kernel, "rotary"),
        (activation, "silu_and_mul"),
        (activation, "gelu_and_mul"),
    )
    for module, name in functions:
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, function=function, **kw: (taken.append(function), function(*args, **kw))[1]
        )
    x = draw_normal(1, 5, 3, 16, dtype=torch.float32, device=device)
    angles = RotaryEmbedding(1.0 / 100.0 ** (torch.arange(4) / 4))
    layers = [RMSNorm(16, 1e-5).to(device), GemmaRMSNorm(16, 1e-5).to(device)]
    for layer in layers:
        layer.weight.copy_(draw_normal(2, 16, dtype=torch.float32, device=device))
    layers.append(lambda x: apply_rotary(x, *angles.cos_sin(torch.arange(5, device=device), torch.float32)))
    names = ("silu", "gelu", "gelu_new")
    layers += [lambda x, name=name: apply_gated(get_activation(name), x.flatten(1)) for name in names]
    fused = [layer(x) for layer in layers]
    assert len(taken) == len(layers) == 6
    for module in (norm_layer, rotary_layer, activation_layer):
        monkeypatch.setattr(module, "runs_fused", lambda x: False)
    for layer, out in zip(layers, fused, strict=True):
        assert_close(out, layer(x))
    assert len(taken) == 6
