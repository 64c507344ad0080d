"""Layers against transformers' own and against their definitions."""

import pytest
import torch

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import ACTIVATIONS, get_activation
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.layers.norm import GemmaRMSNorm, LayerNorm, PlainLayerNorm, RMSNorm
from rustvllm.layers.rotary import RotaryEmbedding, apply_rotary

X = torch.linspace(-6, 6, 601)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_those_that_transformers_means(name):
    from transformers.activations import ACT2FN

    torch.testing.assert_close(get_activation(name)(X), ACT2FN[name](X), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["frog", "", None, 3, ["gelu"]])
def test_unknown_activations_are_refused(name):
    with pytest.raises(ModelLoadError, match="is not supported; supported: gelu, gelu_fast"):
        get_activation(name)


def filled(layer):
    torch.manual_seed(0)
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


def test_norms():
    x = torch.randn(5, 16) * 3
    norm = filled(LayerNorm(16, 1e-5))
    centred = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), centred * norm.weight + norm.bias)
    norm = filled(RMSNorm(16, 1e-6))
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight)
    half = norm.to(torch.bfloat16)
    assert half(x.to(torch.bfloat16)).dtype == torch.bfloat16
    large = torch.full((1, 16), 300.0, dtype=torch.float16)  # its square overflows float16
    assert norm.to(torch.float16)(large).isfinite().all()


def test_norms_of_other_families():
    x = torch.randn(5, 16) * 3
    centred = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(PlainLayerNorm(16, 1e-5)(x), centred)
    assert not list(PlainLayerNorm(16, 1e-5).parameters())
    norm = filled(GemmaRMSNorm(16, 1e-6))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight)
    torch.testing.assert_close(norm(x), expected)
    half = norm.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.1, rtol=0.02)


def test_linear_and_embedding():
    linear, x = filled(Linear(4, 3, bias=True)), torch.randn(2, 4)
    torch.testing.assert_close(linear(x), x @ linear.weight.T + linear.bias)
    assert Linear(4, 3, bias=False).bias is None
    embedding = filled(Embedding(6, 2))
    assert torch.equal(embedding(torch.tensor([5, 0], dtype=torch.int32)), embedding.weight[[5, 0]])
    assert not any(parameter.requires_grad for layer in (linear, embedding) for parameter in layer.parameters())


def test_rotation_keeps_length_and_depends_on_distance_only():
    rotary = RotaryEmbedding.from_config({"rope_theta": 100.0}, 8, 64)
    query, key = torch.randn(2, 1, 1, 8)

    def score(at_query, at_key):
        cos, sin = rotary.cos_sin(torch.tensor([at_query, at_key]), torch.float32)
        turned = apply_rotary(torch.cat((query, key)), cos, sin)
        torch.testing.assert_close(turned.norm(dim=-1), torch.cat((query, key)).norm(dim=-1))
        return float((turned[0] * turned[1]).sum())

    assert score(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-5)
    assert score(17, 12) == pytest.approx(score(5, 0), abs=1e-4)
    assert abs(score(5, 0) - score(6, 0)) > 1e-3


def test_partial_rotation_leaves_the_rest():
    rotary = RotaryEmbedding.from_config({"partial_rotary_factor": 0.5}, 8, 64, partial=True)
    cos, sin = rotary.cos_sin(torch.tensor([0, 3]), torch.float32)
    assert cos.shape == sin.shape == (2, 1, 4)
    x = torch.randn(2, 3, 8)
    turned = apply_rotary(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[0], x[0])
    whole = RotaryEmbedding.from_config({}, 4, 64)
    torch.testing.assert_close(turned[..., :4], apply_rotary(x[..., :4], *whole.cos_sin(torch.tensor([0, 3]), x.dtype)))


TRAINED = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_theta": 100.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0]}


@pytest.mark.parametrize(("max_model_len", "factors"), [(16, [1.0, 1.5]), (17, [2.0, 8.0])])
def test_longrope_chooses_its_factors_once(max_model_len, factors):
    rotary = RotaryEmbedding.from_config(TRAINED | {"rope_parameters": LONGROPE}, 4, max_model_len)
    torch.testing.assert_close(rotary.inv_freq, torch.tensor([1.0, 0.1]) / torch.tensor(factors))
    assert rotary.attention_scaling == pytest.approx(1.5**0.5)  # 1 + ln(64 / 16) / ln 16


def test_dynamic_stretches_once():
    hf_config = TRAINED | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    plain = RotaryEmbedding.from_config(hf_config, 4, 64)
    torch.testing.assert_close(plain.inv_freq, torch.tensor([1.0, 0.1]))
    stretched = RotaryEmbedding.from_config(hf_config, 4, 128)  # theta · (2 · 128 / 64 − 1) ** (4 / 2)
    torch.testing.assert_close(stretched.inv_freq, torch.tensor([1.0, 900.0**-0.5]))
