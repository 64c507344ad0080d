"""Products with weights of 4 and 8 bits against plain torch, and models out of quantised files against transformers."""

import numpy as np
import pytest
import torch
from checkpoints import GPT2, LLAMA, assert_matches, make, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_schedule import NaiveEngine, Request
from ragged import DTYPES, TOLERANCES

from quantized_files import awq, gptq, meaning, packed, random_layer, write_folder
from rustvllm.config import LoadConfig
from rustvllm.config.lora import LoRAConfig
from rustvllm.config.model_folder import read_model_config
from rustvllm.kernels import quantized_matmul, reference
from rustvllm.kernels.quantized_matmul import QuantizedWeight, pack_nibbles, quantized_linear, unpack
from rustvllm.layers import triton_quantized
from rustvllm.layers.linear import Linear
from rustvllm.layers.triton_quantized import QuantizedLinear
from rustvllm.lora.store import AdapterStore
from rustvllm.model_loader import load_model
from rustvllm.worker.dense_layers import make_batch_invariant, make_device_packer

ZEROS = ["middle", "point", "minimum"]


def make_weight(seed, bits, zeros, group_size, shape, kept, device):
    """Random numbers, scales and offsets."""
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = shape
    groups = -(-in_features // group_size)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    numbers = torch.randint(low, high, shape, generator=generator)
    scales = (torch.rand((groups, out_features), generator=generator) + 0.5) / (high - low)
    offsets = None
    if zeros == "point":
        offsets = torch.randint(0, 16, scales.shape, generator=generator).to(torch.uint8).to(device)
    elif zeros == "minimum":
        offsets = torch.rand(scales.shape, generator=generator).to(kept).to(device)
    stored = pack_nibbles(numbers.to(torch.uint8)) if bits == 4 else numbers.to(torch.int8)
    return QuantizedWeight(stored.to(device), scales.to(kept).to(device), offsets, in_features, group_size)


def make_rows(seed, *shape, dtype, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.fixture
def sums(monkeypatch):
    """Launches that add up what was split."""
    seen, inner = [], quantized_matmul._sum_kernel.run
    monkeypatch.setattr(
        quantized_matmul._sum_kernel, "run", lambda *args, **options: seen.append(1) or inner(*args, **options)
    )
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_every_form(bits, dtype, device):
    @settings(max_examples=9, derandomize=True, deadline=None)
    @given(
        st.sampled_from(ZEROS if bits == 4 else ["middle", "minimum"]),
        st.sampled_from([8, 16, 32, 64, 96, 128, 1000]),
        st.sampled_from([1, 30]),
        st.sampled_from([8, 96, 200]),
        st.sampled_from([0, 1, 5, 17, 40]),
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        st.booleans(), st.booleans(), st.integers(0, 2**31),
    )  # fmt: skip
    def run(zeros, group_size, out_features, in_features, num_rows, kept, has_bias, has_residual, seed):
        weight = make_weight(seed, bits, zeros, group_size, (out_features, in_features), kept, device)
        x = make_rows(seed + 1, num_rows, in_features, dtype=dtype, device=device) * in_features**-0.5
        residual, bias = make_rows(seed + 2, num_rows + 1, out_features, dtype=dtype, device=device).split(
            [num_rows, 1]
        )
        bias, residual = bias[0] if has_bias else None, residual if has_residual else None
        expected = reference.quantized_linear(x, weight, bias, residual)
        for is_invariant in (False, True):
            actual = quantized_linear(x, weight, bias, residual, is_invariant=is_invariant)
            torch.testing.assert_close(actual, expected, **TOLERANCES[dtype])

    run()


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("bits", [4, 8])
def test_unpacked_rows(bits, zeros, device):
    for group_size in (16, 32, 64, 500):
        weight = make_weight(
            group_size, bits, zeros if bits == 4 else "middle", group_size, (35, 200), torch.float16, device
        )
        whole = reference.unpack(weight)
        assert whole.abs().max() > 0
        for dtype in (torch.float32, torch.float16):
            torch.testing.assert_close(unpack(weight, dtype), whole.to(dtype), atol=1e-6, rtol=1e-3)
        assert torch.equal(unpack(weight, torch.float32, 7, 20), unpack(weight, torch.float32)[20:27])


def test_numbers_of_4_bits_keep_their_places(device):
    numbers = torch.randint(0, 16, (3, 100), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    stored = pack_nibbles(numbers)
    assert stored.shape == (3, quantized_matmul.nibble_bytes(100))
    ones = torch.ones((100, 3), device=device)
    weight = QuantizedWeight(stored.to(device), ones, torch.zeros_like(ones), 100, 1)
    assert torch.equal(unpack(weight, torch.float32).cpu(), numbers.float())


def test_few_rows_of_many_features_are_split(sums, device):
    in_features = 4096 if device.type == "cuda" else 512
    weight = make_weight(3, 4, "point", 32, (16, in_features), torch.float16, device)
    x = make_rows(4, 2, in_features, dtype=torch.float32, device=device) * in_features**-0.5
    out, residual = quantized_linear(x, weight), make_rows(5, 2, 16, dtype=torch.float32, device=device)
    assert len(sums) == 1
    torch.testing.assert_close(out, reference.quantized_linear(x, weight), **TOLERANCES[torch.float32])
    torch.testing.assert_close(quantized_linear(x, weight, None, residual), out + residual)
    assert len(sums) == 2
    quantized_linear(x, weight, is_invariant=True)
    assert len(sums) == 2


@pytest.mark.usefixtures("rows_alike")
def test_a_row_has_the_same_bits_in_any_company(device):
    weight = make_weight(7, 4, "point", 64, (40, 256), torch.float16, device)
    x = make_rows(8, 50, 256, dtype=torch.float32, device=device)
    together = quantized_linear(x, weight, is_invariant=True)
    for row in (0, 1, 31, 49):
        assert torch.equal(quantized_linear(x[row : row + 1], weight, is_invariant=True)[0], together[row])


SIZES = {"hidden_size": 64, "intermediate_size": 128}
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
    "gptq with an order": ("gpt2", GPT2 | {"n_embd": 64}, GPTQ, gptq, 4),
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
    assert len(kernels_of(model)) >= 12, "query, key and value are one layer, and so are gate and up"
    check(reference_model, model)
    if name != "awq":
        return
    unpacked, inner = [], quantized_matmul.unpack
    monkeypatch.setattr(triton_quantized, "MOST_ROWS", 3)
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
             "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "output.": "Q8_0"}  # fmt: skip
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
