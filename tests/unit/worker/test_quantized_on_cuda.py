"""A quantised checkpoint on a GPU that is not there: it never has dense weights, and its steps wait for nothing."""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not made for this platform", allow_module_level=True)

import naive_schedule
from checkpoints import LLAMA, make
from fake_cuda import DEVICE, FakeCuda, use_fake_cuda
from naive_schedule import NaiveEngine, Request

from quantized_files import awq, meaning, random_layer, write_folder
from rustvllm.config import LoadConfig
from rustvllm.config.model_folder import read_model_config
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers import linear as linear_module
from rustvllm.layers.gpu.quantized import QuantizedLinear
from rustvllm.layers.linear import Linear
from rustvllm.model_loader import load_model
from rustvllm.worker.dense_layers import make_device_packer

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
DENSE_LAYERS = 8
"""Query, key and value are one, gate and up are one; in two layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("awq"), np.random.default_rng(2)

    def make_layer(name, weight):
        parts = random_layer(rng, weight, 4, 128, symmetric=False)
        return awq(name, *parts), meaning(*parts)

    write_folder(path, make("llama", LLAMA | SIZES), AWQ, make_layer)
    return path


@pytest.fixture
def cuda(monkeypatch):
    device = FakeCuda()
    use_fake_cuda(monkeypatch, device)
    monkeypatch.setattr(naive_schedule, "make_streams", lambda device_: device.streams)
    return device


def load(folder, memory=1 << 34):
    config = read_model_config(folder, model=str(folder))
    make_packer = lambda outline: make_device_packer(outline, DEVICE)  # noqa: E731 -- of one use
    return load_model(config, LoadConfig(), torch.bfloat16, DEVICE, memory, make_packer)


def test_its_dense_weights_are_never_there(folder, cuda, monkeypatch):
    made, empty = [], linear_module.empty_parameter

    def recorded(*shape):
        parameter = empty(*shape)
        made.extend([] if parameter.is_meta else [shape])
        return parameter

    monkeypatch.setattr(linear_module, "empty_parameter", recorded)
    with cuda:
        model = load(folder)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    kept = [linear for linear in linears if isinstance(linear.kernel, QuantizedLinear)]
    assert len(kept) == DENSE_LAYERS
    assert all(linear.weight.is_meta for linear in kept)
    assert made
    assert not any(len(shape) == 2 and shape[0] > LLAMA["vocab_size"] for shape in made), "memory for a dense layer"
    assert model.lm_head.weight.device == DEVICE, "what is not quantised has its memory"
    stored = sum(linear.weight.numel() for linear in kept)
    assert sum(linear.kernel.nbytes for linear in kept) < 0.53 * stored


def test_it_fits_where_its_dense_weights_would_not(folder, cuda):
    with cuda:
        with pytest.raises(ModelLoadError, match="needs"):
            load(folder, 1 << 20)
        outline = load(folder, 4 << 20)
    dense = sum(parameter.nbytes for parameter in outline.parameters())
    assert dense > 9 << 20


def test_its_steps_wait_for_nothing(folder, cuda):
    with cuda:
        model = load(folder)
        engine = NaiveEngine(model, block_size=16, attention_backend="triton", budget=512)
        engine.capture_logits = False
        engine.admit([Request([5] * 60, 4), Request([7, 8, 9], 4)])
        engine.step()  # prompts
        engine.step()  # what is made once
        with cuda.watch():
            engine.step()
    assert cuda.faults == []
    products = cuda.launches.count("_quantized_kernel")
    assert products == DENSE_LAYERS
    assert 0 < cuda.launches.count("_sum_kernel") <= DENSE_LAYERS, "few rows are split among programs"
    assert "_unpack_kernel" not in cuda.launches


def test_long_prompts_meet_the_unpacked_weight(folder, cuda):
    with cuda:
        model = load(folder)
        x = torch.zeros((300, SIZES["hidden_size"]), dtype=torch.bfloat16, device=DEVICE)
        linear = next(module for module in model.modules() if isinstance(module, Linear) and module.kernel is not None)
        with cuda.watch():
            out = linear(x)
            assert cuda.launches == ["_unpack_kernel"]
            linear(x[:200])
    assert out.shape == (300, linear.weight.shape[0])
    assert cuda.launches[1:] == ["_quantized_kernel"]
