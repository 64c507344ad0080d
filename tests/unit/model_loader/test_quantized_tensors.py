"""Quantised folders that do not fit are refused by name before weights are read; the numbers of those that do."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantized_files import awq, gptq, meaning, packed, random_layer
from rustvllm.byte_progress import ByteProgress
from rustvllm.config.checkpoint.forms import read_forms
from rustvllm.config.checkpoint.quantized_folders import read_quantization, refuse_undescribed
from rustvllm.exceptions import ModelLoadError
from rustvllm.model_loader.checkpoint import read_headers
from rustvllm.model_loader.quantized_numbers import dense_rows
from rustvllm.model_loader.quantized_tensors import join_quantized
from rustvllm.model_loader.reading import TensorReader

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}}},
}
CONFIGS = {"gptq": GPTQ, "awq": AWQ, "packed": PACKED}


def weights_of(**changes):
    return PACKED | {"config_groups": {"g": {"weights": PACKED["config_groups"]["g"]["weights"] | changes}}}


LAYER = "model.layers.0.mlp.up_proj"


def layer(kind, seed=0):
    rng = np.random.default_rng(seed)
    parts = random_layer(rng, rng.normal(size=(24, 64)).astype(np.float32), 4, 32, symmetric=kind == "packed")
    return {"gptq": gptq, "awq": awq, "packed": packed}[kind](LAYER, *parts), meaning(*parts)


def join(folder, tensors, how):
    as_torch = {
        k: v if isinstance(v, torch.Tensor) else torch.tensor(np.ascontiguousarray(v)) for k, v in tensors.items()
    }
    save_file(as_torch, folder / "model.safetensors")
    stored = read_headers(folder)
    return join_quantized(stored, read_quantization({"quantization_config": how}, folder), folder, is_turned=False)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("piece", [1, 1 << 24])
def test_numbers_are_those_of_the_plain_description(kind, piece, tmp_path, monkeypatch):
    monkeypatch.setattr("rustvllm.model_loader.quantized_numbers.PIECE_NUMBERS", piece)  # one word of outputs at a time
    tensors, expected = layer(kind)
    joined = join(tmp_path, tensors | {"other.bias": torch.ones(3)}, CONFIGS[kind])
    assert set(joined) == {f"{LAYER}.weight", "other.bias"}
    with TensorReader(ByteProgress("loading", "m", is_shown=False)) as reader:
        pieces = list(dense_rows(reader, joined[f"{LAYER}.weight"]))
    assert len(pieces) == (3 if piece == 1 else 1)
    assert np.array_equal(torch.cat([rows for _, rows in pieces]).numpy(), expected)


def drop(name):
    return lambda tensors: tensors.pop(f"{LAYER}.{name}")


def put(name, value):
    return lambda tensors: tensors.update({f"{LAYER}.{name}": value})


def spoil(name, index, value):
    def edit(tensors):
        tensors[f"{LAYER}.{name}"] = np.array(tensors[f"{LAYER}.{name}"])
        tensors[f"{LAYER}.{name}"][index] = value

    return edit


@pytest.mark.parametrize(
    ("kind", "edit", "says"),
    [
        ("gptq", drop("qzeros"), "model.layers.0.mlp.up_proj: it has g_idx, qweight, scales, but no qzeros"),
        ("gptq", drop("scales"), "but no scales"),
        ("gptq", drop("qweight"), "but no qweight"),
        ("awq", drop("qzeros"), "but no qzeros"),
        ("packed", drop("weight_scale"), "but no weight_scale"),
        ("asymmetric", lambda _: None, r"up_proj: it has weight_packed, .*, but no weight_zero_point"),
        ("fp8", put("weight", torch.ones(24, 64).to(torch.float8_e4m3fn)), "it has weight, but no weight_scale"),
        ("packed", drop("weight_shape"), "it has weight_packed, but no weight_shape"),
        ("gptq", put("scales", np.ones((3, 24), np.float16)), r"up_proj.scales' is F16 \[3, 24\], expected \[2, 24\]"),
        ("gptq", put("scales", np.ones((2, 24), np.int32)), "has dtype I32, not F16 or BF16 or F32"),
        ("gptq", put("qzeros", np.ones((2, 4), np.int32)), r"up_proj.qzeros' is I32 \[2, 4\], expected \[2, 3\]"),
        ("gptq", put("qweight", np.ones((8, 24), np.int8)), r"is I8 \[8, 24\], not a matrix of I32"),
        ("gptq", put("qweight", np.ones((9, 24), np.int32)), "groups of 32 do not divide its 72 inputs"),
        ("gptq", put("qweight", np.ones((0, 24), np.int32)), "not a matrix of I32"),
        ("gptq", put("g_idx", np.arange(63, dtype=np.int32) // 32), r"is I32 \[63\], expected I32 \[64\]"),
        ("gptq", spoil("g_idx", 5, 2), "refers to groups 0 to 2, but there are 2"),
        ("gptq", spoil("g_idx", 5, -7), "refers to groups -7 to 1"),
        ("gptq", spoil("scales", (1, 3), np.inf), "up_proj.scales' has a scale that is not finite"),
        ("awq", spoil("scales", (1, 3), np.nan), "has a scale that is not finite"),
        ("packed", spoil("weight_shape", 0, 1 << 60), "weight_shape says 1152921504606846976 x 64, which in 4 bits"),
        ("packed", spoil("weight_shape", 1, -5), "weight_shape says 24 x -5"),
        ("packed", put("weight_scale", np.ones((24, 3), np.float16)), r"is F16 \[24, 3\], expected \[24, 2\]"),
        ("packed", put("weight_scale", np.ones((24, 4), np.float16)), "has groups of 16, but the configuration says"),
        ("packed", put("weight_zero_point", np.ones((9, 2), np.int32)), r"is I32 \[9, 2\], expected \[3, 2\]"),
        ("packed", put("weight", np.ones((24, 64), np.float32)), "both exist"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(kind, edit, says, tmp_path):
    tensors = {} if kind == "fp8" else layer("packed" if kind == "asymmetric" else kind)[0]
    edit(tensors)
    others = {"asymmetric": weights_of(symmetric=False), "fp8": {"quant_method": "fp8"}}
    with pytest.raises(ModelLoadError, match=says):
        join(tmp_path, tensors, (CONFIGS | others)[kind])


@pytest.mark.parametrize("kind", [*CONFIGS, "fp8"])
def test_quantised_weights_without_a_configuration_are_named(kind, tmp_path):
    numbers = {f"{LAYER}.weight": torch.ones(24, 64).to(torch.float8_e4m3fn), f"{LAYER}.weight_scale": torch.ones(1)}
    tensors = numbers if kind == "fp8" else {name: torch.tensor(value) for name, value in layer(kind)[0].items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    says = r"1 tensors \(.*up_proj.*but config.json has no quantization_config"
    with pytest.raises(ModelLoadError, match=says):
        refuse_undescribed(dtypes(tmp_path), tmp_path)
    with pytest.raises(ModelLoadError, match=says):  # what ``rustvllm inspect`` counts parameters of
        read_forms(tmp_path)
    plain = {"a.weight": torch.ones(2), "a.weight_scale": torch.ones(1)}  # what a model has that is not quantised
    save_file(plain, tmp_path / "model.safetensors")
    refuse_undescribed(dtypes(tmp_path), tmp_path)
    assert sum(form.num_parameters for form in read_forms(tmp_path)) == 3


def dtypes(folder):
    return {name: tensor.dtype for name, tensor in read_headers(folder).items()}


def test_many_misfits_are_counted(tmp_path):
    tensors = {f"layers.{index}.up_proj.qweight": np.ones((8, 24), np.int32) for index in range(11)}
    with pytest.raises(
        ModelLoadError, match=r"these tensors are not valid for GPTQ of 4 bits, groups of 32: .*; and 3 more"
    ):
        join(tmp_path, tensors, GPTQ)


def test_scales_of_activations_and_of_the_cache_are_left_alone(tmp_path):
    tensors, _ = layer("packed")
    tensors |= {f"{LAYER}.input_scale": np.ones(1, np.float32), "layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    assert set(join(tmp_path, tensors, PACKED)) == {f"{LAYER}.weight"}


def test_a_block_that_is_larger_than_the_weight(tmp_path):
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.weight_scale_inv": torch.full((1, 1), 0.5)}
    joined = join(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [1 << 80, 128]})
    with TensorReader(ByteProgress("loading", "m", is_shown=False)) as reader:
        ((_, rows),) = dense_rows(reader, joined[f"{LAYER}.weight"])
    assert torch.equal(rows, weight.float() * 0.5)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "this checkpoint is bitsandbytes nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "this checkpoint is bitsandbytes int8"),
        *(({"quant_method": name}, f"is {name}") for name in ("hqq", "quanto", "aqlm", "vptq", "eetq", "torchao")),
        ({"bits": 4}, "names no quant_method"),
        (GPTQ | {"bits": 3}, "this checkpoint is GPTQ of 3 bits; rustvllm reads 4 and 8 bits"),
        (GPTQ | {"bits": 2}, "GPTQ of 2 bits"),
        (GPTQ | {"bits": "4"}, "bits of the quantisation must be an integer, got '4'"),
        (GPTQ | {"bits": True}, "must be an integer, got True"),
        (GPTQ | {"group_size": 0}, "group_size of the quantisation must be an integer above 0, or -1"),
        (GPTQ | {"group_size": None}, "group_size of the quantisation must be"),
        (GPTQ | {"checkpoint_format": "marlin"}, "in the checkpoint_format 'marlin'; rustvllm reads gptq and gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "in the checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"with other settings for some layers \(dynamic"),
        (GPTQ | {"dynamic": 5}, r"with other settings for some layers \(dynamic: 5"),
        (GPTQ | {"pack_dtype": "int8"}, "packed into 'int8'; rustvllm reads int32"),
        (AWQ | {"bits": 8}, "this checkpoint is AWQ of 8 bits; rustvllm reads 4 bits"),
        (AWQ | {"version": "gemv"}, "in the layout of version 'gemv'; rustvllm reads gemm"),
        (AWQ | {"backend": "llm-awq"}, "in the layout of the backend llm-awq"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "in the format 'nvfp4-pack-quantized'"),
        (PACKED | {"format": "marlin-24"}, "in the format 'marlin-24'"),
        (PACKED | {"format": "float-quantized"}, "in the format 'float-quantized' of type 'int'"),
        (PACKED | {"config_groups": {}}, "lacks config_groups"),
        (
            PACKED | {"config_groups": {"g": {"input_activations": {}}}},
            "whose config group 'g' does not quantise weights",
        ),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparse weights"),
        (PACKED | {"transform_config": {"R1": {}}}, "with rotated weights"),
        (weights_of(type="uint"), "in the format 'pack-quantized' of type 'uint'"),
        ("gptq", "quantization_config must be a JSON object or null, got 'gptq'"),
        (weights_of(num_bits=3), "; rustvllm reads 4 and 8 bits"),
        (weights_of(strategy="tensor_group", group_size=None), "with the strategy 'tensor_group' for scales"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "in the format 'e5m2'; rustvllm reads e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"must be two integers above 0, got \[128\]"),
    ],
)
def test_what_is_not_read_is_named_with_what_works(how, says, tmp_path):
    with pytest.raises(ModelLoadError, match=says) as caught:
        read_quantization({"quantization_config": how}, tmp_path)
    assert "config.json" in str(caught.value)
    if "must be" not in says and "names no" not in says and "lacks" not in says:
        assert "Use a GGUF file of this model" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"quantization_config": GPTQ}, {}, "GPTQ of 4 bits, groups of 32"),
        ({"quantization_config": GPTQ | {"group_size": -1}}, {}, "GPTQ of 4 bits, whole rows"),
        ({"quantization_config": GPTQ | {"dynamic": {"-:.*down.*": {}}}}, {}, "GPTQ of 4 bits, groups of 32"),
        ({"quantization_config": GPTQ | {"quant_method": "gptq_marlin"}}, {}, "GPTQ of 4 bits, groups of 32"),
        ({"quantization_config": AWQ | {"version": "exllama"}}, {}, "AWQ of 4 bits, groups of 32"),
        ({"compression_config": PACKED}, {}, "compressed-tensors of 4 bits, groups of 32"),
        ({"quantization_config": None}, {"quantize_config.json": GPTQ}, "None"),
        ({}, {"quantize_config.json": {"bits": 4, "group_size": 128}}, "GPTQ of 4 bits, groups of 128"),
        ({}, {"quant_config.json": {"w_bit": 4, "q_group_size": 64}}, "AWQ of 4 bits, groups of 64"),
        ({}, {}, "None"),
    ],
)  # fmt: skip
def test_where_it_is_found(config, files, expected, tmp_path):
    for name, how in files.items():
        (tmp_path / name).write_text(json.dumps(how))
    assert str(read_quantization(config, tmp_path)) == expected


@pytest.mark.parametrize("content", ["[1]", "{", '"x"'])
def test_a_damaged_file_of_old_tools(content, tmp_path):
    (tmp_path / "quantize_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"quantize_config\.json"):
        read_quantization({}, tmp_path)
