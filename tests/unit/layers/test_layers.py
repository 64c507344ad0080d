"""Layers against transformers' own and against their definitions."""

import pytest
import torch

from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.activation import ACTIVATIONS, get_activation
from rustvllm.layers.linear import Embedding, Linear
from rustvllm.layers.norm import LayerNorm, RMSNorm
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
