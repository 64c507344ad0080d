"""Models out of quantised files, whose products are of 4 and 8 bits on a device, against transformers."""

import numpy as np
import pytest
import torch
from checkpoints import GPT2, LLAMA, assert_matches, make, prompts
from naive_schedule import NaiveEngine, Request

from quantized_files import awq, gptq, meaning, packed, random_layer, write_folder
from rustvllm.config import LoadConfig
from rustvllm.config.lora import LoRAConfig
from rustvllm.config.model_folder import read_model_config
from rustvllm.kernels import quantized_matmul
from rustvllm.layers.gpu import quantized
from rustvllm.layers.gpu.quantized import QuantizedLinear
from rustvllm.layers.linear import Linear
from rustvllm.lora.store import AdapterStore
from rustvllm.model_loader import load_model
from rustvllm.worker.dense_layers import make_batch_invariant, make_device_packer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        "targets": ["Linear"], "input_activations": None,
    }},
}  # fmt: skip
FOLDERS = {
    # name -> kind of checkpoint, its configuration, how it was quantised, what makes a layer's tensors, bits
    "awq": ("llama", LLAMA | SIZES | {"attention_bias": True}, AWQ, awq, 4),
    "gptq with an order": ("gpt2", GPT2 | {"n_embd": 64, "n_layer": 2}, GPTQ, gptq, 4),
    "8 bits": ("llama", LLAMA | SIZES, PACKED, lambda *a: packed(*a, bits=8), 8),
}


def write(folder, name):
    family, config, quantization, lay_out, bits = FOLDERS[name]
    rng, orders = np.random.default_rng(5), {}

    def make_layer(layer, weight):
        order = None
        if quantization.get("desc_act"):  # the same for all that read one input
            order = orders.setdefault((layer.rpartition(".")[0], weight.shape[1]), rng.permutation(weight.shape[1]))
        parts = random_layer(rng, weight, bits, 32, symmetric=bits == 8, order=order)
        return lay_out(layer, *parts), meaning(*parts)

    return write_folder(folder, make(family, config), quantization, make_layer)


def load(path, device):
    """As a worker on a GPU does."""
    config = read_model_config(path, model=str(path))
    make_packer = lambda outline: make_device_packer(outline, device)  # noqa: E731 -- of one use
    return load_model(config, LoadConfig(), torch.float32, device, 1 << 30, make_packer)


def kernels_of(model):
    """Of the layers that compute from whole numbers; their dense weights are nowhere."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    kept = [linear for linear in linears if isinstance(linear.kernel, QuantizedLinear)]
    assert all(linear.weight.is_meta for linear in kept)
    assert not any(linear.weight.is_meta for linear in linears if linear not in kept)
    return [linear.kernel for linear in kept]


def check(reference_model, model, **options):
    requests = [Request(prompt, 3) for prompt in prompts(97, [1, 9, 21])]
    NaiveEngine(model, budget=32, chunk=11, block_size=8, attention_backend="triton", **options).run(requests)
    clear = sum(assert_matches(reference_model, request) for request in requests)
    assert clear > 6, "margins too small to say anything"


@pytest.mark.parametrize("name", FOLDERS)
def test_models_out_of_quantised_folders_have_transformers_logits(name, device, tmp_path, monkeypatch):
    reference_model = write(tmp_path, name)
    model = load(tmp_path, device)
    assert len(kernels_of(model)) >= 8, "query, key and value are one layer, and so are gate and up"
    check(reference_model, model)
    if name != "awq":
        return
    unpacked, inner = [], quantized_matmul.unpack
    monkeypatch.setattr(quantized, "MOST_ROWS", 3)
    monkeypatch.setattr(quantized_matmul, "unpack", lambda *args: unpacked.append(args[1]) or inner(*args))
    check(reference_model, model)
    assert torch.float32 in unpacked, "prompts were multiplied by the unpacked weight"


@pytest.mark.usefixtures("rows_alike")
def test_batch_invariant_logits_of_a_quantised_model(device, tmp_path):
    reference_model = write(tmp_path, "awq")
    model = load(tmp_path, device)
    make_batch_invariant(model)
    assert all(kernel.is_invariant for kernel in kernels_of(model))
    check(reference_model, model)


def test_adapters_over_a_quantised_model(device, tmp_path):
    """Their products are added to those of whole numbers, in the type of the rows."""
    pytest.importorskip("peft", reason="peft is not installed")
    from peft_adapters import make_adapter, with_adapter

    reference_model = write(tmp_path / "model", "awq")
    model = load(tmp_path / "model", device)
    make_adapter(reference_model, tmp_path / "a", seed=1, r=4, target_modules="all-linear")
    send = lambda array: torch.tensor(array).to(device)  # noqa: E731 -- of one use
    store = AdapterStore(model, LoRAConfig(max_loras=1), torch.float32, None, batch_invariant=False, send=send)
    store.add(1, "a", tmp_path / "a")
    requests = [Request(prompt, 3, {"adapter": i % 2}) for i, prompt in enumerate(prompts(97, [1, 9, 21, 5]))]
    engine = NaiveEngine(model, budget=32, chunk=11, block_size=8, attention_backend="triton")
    engine.runner.adapters = store
    engine.run(requests)
    kernels_of(model)
    clear = sum(assert_matches(reference_model, request) for request in requests[::2])
    with with_adapter(reference_model, tmp_path / "a") as adapted:
        clear += sum(assert_matches(adapted, request) for request in requests[1::2])
    assert clear > 8, "margins too small to say anything"


def test_a_model_out_of_a_gguf_file_of_many_types(device, tmp_path):
    gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)
    large = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": False}
    kinds = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K", "ffn_down": "Q6_K",
             "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "output.": "MXFP4"}  # fmt: skip
    reference_model = make("llama", LLAMA | large)
    path = tmp_path / "m.gguf"
    gguf_files.write_model(
        path, reference_model, lambda name: next((kind for part, kind in kinds.items() if part in name), "F16")
    )
    model = load(path, device)
    assert {kernel._weight.zeros for kernel in kernels_of(model)} == {"middle", "minimum"}
    assert {kernel._weight.bits for kernel in kernels_of(model)} == {4, 8}
    assert len(kernels_of(model)) == 5, "a layer of four, and the head"
    check(reference_model.eval(), model)
