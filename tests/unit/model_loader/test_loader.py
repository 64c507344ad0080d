"""Checkpoints in every layout that is read, and every way a checkpoint can be wrong: the message names what."""

import json
import re
import struct
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rustvllm.config import LoadConfig
from rustvllm.exceptions import ModelLoadError
from rustvllm.model_loader import load_model

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 11, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


OPTIONAL_KEYS = ("architectures", "num_key_value_heads", "max_position_embeddings")


def load(folder, config=None, *, load_format="auto", dtype=torch.float32, max_model_len=16, seed=0, config_file=None):
    hf_config = config if config is not None else json.loads((folder / "config.json").read_text())
    model_config = SimpleNamespace(
        model="m", path=folder, hf_config=hf_config, architecture=hf_config["architectures"][0],
        max_model_len=max_model_len, seed=seed, model_impl="rustvllm", pooler=None,
        config_file=config_file or (folder and folder / "config.json"),
    )  # fmt: skip
    return load_model(model_config, LoadConfig(load_format=load_format), dtype, torch.device("cpu"), 1 << 30)


def tensors_of(config, seed=0):
    """A whole checkpoint of a configuration, under the names without prefix."""
    model = load(None, config, load_format="dummy", seed=seed)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.checkpoint_tensors().items()}
    if model.lm_head is not None:
        tensors["lm_head.weight"] = model.lm_head.weight.clone()
    return tensors


def write(folder, config, tensors, name="model.safetensors"):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


def same(model, tensors):
    got = model.checkpoint_tensors()
    return all(torch.equal(got[name], tensor) for name, tensor in tensors.items() if name in got)


@pytest.fixture(params=[GPT2, LLAMA], ids=["gpt2", "llama"])
def config(request):
    return dict(request.param)


def prefixed(tensors, config):
    prefix = "transformer." if "n_embd" in config else "model."
    return {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("with_prefix", [True, False])
def test_names_with_and_without_prefix(tmp_path, config, with_prefix):
    tensors = tensors_of(config)
    model = load(write(tmp_path, config, prefixed(tensors, config) if with_prefix else tensors))
    assert same(model, tensors)


def test_sharded(tmp_path, config):
    tensors = tensors_of(config)
    names = sorted(tensors)
    parts = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
    for file, part in parts.items():
        write(tmp_path, config, {name: tensors[name] for name in part}, file)
    (tmp_path / "unrelated.safetensors").write_bytes(b"an index says which files count")
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(load(tmp_path), tensors)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_dtypes_are_converted(tmp_path, config, stored, wanted):
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(config).items()}
    model = load(write(tmp_path, config, tensors), dtype=wanted)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert same(model, {name: tensor.to(wanted) for name, tensor in tensors.items()})
    assert torch.get_default_dtype() == torch.float32


def test_what_old_checkpoints_carry_along_is_ignored(tmp_path):
    gpt2 = prefixed(tensors_of(GPT2), GPT2)
    gpt2 |= {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool),
        "h.1.attn.masked_bias": torch.zeros(1),
    }
    assert same(load(write(tmp_path, GPT2, gpt2)), tensors_of(GPT2))
    llama = prefixed(tensors_of(LLAMA), LLAMA) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}
    assert same(load(write(tmp_path, LLAMA, llama)), tensors_of(LLAMA))


@pytest.mark.parametrize("tied", [True, False])
def test_heads(tmp_path, config, tied):
    config["tie_word_embeddings"] = tied
    tensors = tensors_of(config)
    assert ("lm_head.weight" in tensors) is not tied
    model = load(write(tmp_path, config, tensors))
    hidden = torch.randn(3, 8)
    embedding = tensors.get("wte.weight", tensors.get("embed_tokens.weight"))
    assert torch.equal(model.compute_logits(hidden), hidden @ (embedding if tied else tensors["lm_head.weight"]).T)


def test_a_tied_head_stored_twice_is_dropped_when_equal_and_kept_when_not(tmp_path, config):
    config["tie_word_embeddings"] = True
    tensors = tensors_of(config)
    name = "wte.weight" if "n_embd" in config else "embed_tokens.weight"
    model = load(write(tmp_path, config, tensors | {"lm_head.weight": tensors[name].clone()}))
    assert model.lm_head is None
    other = tensors[name] + 1
    model = load(write(tmp_path, config, tensors | {"lm_head.weight": other}))
    hidden = torch.randn(3, 8)
    assert torch.equal(model.compute_logits(hidden), hidden @ other.T)
    # Stored under the head's name only.
    moved = dict(tensors)
    moved["lm_head.weight"] = moved.pop(name)
    assert same(load(write(tmp_path, config, moved)), tensors)
    wrong = tensors | {"lm_head.weight": torch.zeros(7, 8)}
    with pytest.raises(ModelLoadError, match=r"'lm_head.weight' has shape \[7, 8\], expected \[11, 8\]"):
        load(write(tmp_path, config, wrong))


def refused(folder, config=None, **options):
    with pytest.raises(ModelLoadError) as caught:
        load(folder, config, **options)
    return str(caught.value)


def test_errors_of_layers_name_the_file_that_the_value_is_from(tmp_path):
    write(tmp_path, LLAMA, tensors_of(LLAMA))
    assert refused(tmp_path, LLAMA | {"rope_theta": -5.0}).startswith(f"{tmp_path}/config.json: rope type 'default'")
    wrong, file = LLAMA | {"rms_norm_eps": -1.0}, tmp_path / "m.gguf"
    message = refused(None, wrong, load_format="dummy", config_file=file)
    assert message == f"{file}: 'rms_norm_eps' must be a positive number, got -1.0"


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path, config):
    tensors = prefixed(tensors_of(config), config)
    names = [name for name in sorted(tensors) if name.endswith(("ln_f.weight", "model.norm.weight"))]
    del tensors[names[0]]
    matrix = next(name for name in sorted(tensors) if name.endswith(("c_fc.weight", "gate_proj.weight")))
    shape = list(tensors[matrix].shape)
    tensors[matrix] = tensors[matrix].T.contiguous()
    tensors["transformer.h.9.what"] = torch.zeros(2)
    message = refused(write(tmp_path, config, tensors))
    assert f"tensor {names[0].split('.', 1)[1]!r} is missing" in message
    assert f"tensor {matrix!r} has shape {shape[::-1]}, expected {shape}" in message
    assert "'transformer.h.9.what' is unexpected" in message
    assert "model.safetensors" in message


def test_many_problems_are_counted(tmp_path, config):
    tensors = tensors_of(config)
    few = dict(list(tensors.items())[:2])
    assert f"and {len(tensors) - 2 - 8} more" in refused(write(tmp_path, config, few))


def test_integer_weights_are_refused(tmp_path, config):
    tensors = tensors_of(config)
    name = min(tensors)
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int8)
    assert "has dtype I8, supported: F64, F32, F16, BF16" in refused(write(tmp_path, config, tensors))


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 0.5, 0.99])
def test_truncated_files(tmp_path, config, keep):
    file = write(tmp_path, config, tensors_of(config)) / "model.safetensors"
    data = file.read_bytes()
    size = keep if isinstance(keep, int) else int(len(data) * keep)
    file.write_bytes(data[:size])
    message = refused(tmp_path)
    assert str(file) in message
    assert f"{size} bytes" in message
    assert "truncated or damaged" in message


@pytest.mark.parametrize(
    "data",
    [
        b"this is not a safetensors file at all, but long enough",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 9) + b"not json!",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 66) + b'{"a":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}',
    ],
)
def test_damaged_headers(tmp_path, config, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    message = refused(tmp_path, config)
    assert "truncated or damaged" in message
    assert "model.safetensors" in message


def test_damaged_index(tmp_path, config):
    write(tmp_path, config, tensors_of(config), "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for text in (
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../a.safetensors"}}',
    ):
        index.write_text(text)
        message = refused(tmp_path)
        assert "model.safetensors.index.json" in message
        assert "weight_map" in message
    index.write_text('{"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}}')
    message = refused(tmp_path)
    assert "2 of 3 shards" in message
    assert "b.safetensors, c.safetensors" in message
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "x" * 300}}))  # longer than a file's name
    assert "1 of 2 shards" in refused(tmp_path)


def test_a_tensor_in_two_files(tmp_path, config):
    tensors = tensors_of(config)
    write(tmp_path, config, tensors, "a.safetensors")
    write(tmp_path, config, dict([next(iter(tensors.items()))]), "b.safetensors")
    assert "is in a.safetensors and in b.safetensors" in refused(tmp_path)
    twice = tensors | {"transformer.wte.weight": tensors["wte.weight"].clone()} if "n_embd" in config else None
    if twice:
        (tmp_path / "b.safetensors").unlink()
        assert "are the same tensor" in refused(write(tmp_path, config, twice, "a.safetensors"))


def test_no_weights(tmp_path, config):
    assert "no weights: expected model.safetensors" in refused(tmp_path, config)
    assert "no such folder" in refused(tmp_path / "absent", config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = refused(tmp_path, config)
    assert "pytorch_model.bin" in message
    assert "only loads safetensors" in message


def test_unknown_architecture_lists_what_is_supported(tmp_path):
    message = refused(tmp_path, {"architectures": ["FrogForCausalLM"]})
    assert "'FrogForCausalLM' is not supported; supported: Dots1ForCausalLM" in message


@pytest.mark.parametrize(
    ("base", "key"),
    [(GPT2, key) for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")]
    + [
        (LLAMA, key)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ],
)
def test_missing_and_absurd_configuration_keys(tmp_path, base, key):
    config = {name: value for name, value in base.items() if name != key}
    message = refused(tmp_path, config, load_format="dummy")
    assert f"'{key}'" in message
    assert "is missing" in message
    for value in (0, -1, 1.5, "8", True, 2**40, [8]):
        message = refused(tmp_path, config | {key: value}, load_format="dummy")
        assert f"'{key}' must be an integer from 1 to 16777216, got {value!r}" in message


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (GPT2 | {"n_head": 3}, "n_embd (8) must be a multiple of n_head (3)"),
        (GPT2 | {"activation_function": "frog"}, "'frog' is not supported; supported: gelu"),
        (GPT2 | {"activation_function": 3}, "'activation_function' must be a string"),
        (GPT2 | {"layer_norm_epsilon": "x"}, "'layer_norm_epsilon' must be a positive number"),
        (GPT2 | {"layer_norm_epsilon": float("nan")}, "'layer_norm_epsilon' must be a positive number"),
        (GPT2 | {"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        (GPT2 | {"add_cross_attention": True}, "'add_cross_attention' = True is not supported"),
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
        (LLAMA | {"head_dim": 3}, "head_dim must be even"),
        (LLAMA | {"rope_scaling": {"rope_type": "axial"}}, "'axial' is not supported; supported: default"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "positive numbers in 'short_factor', got None"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a positive number 'factor', which is"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0}}, "'factor', which is 0"),
        (LLAMA | {"rope_scaling": 8}, "rope_scaling must be an object or null, got 8"),
        (LLAMA | {"rope_theta": -1}, "'rope_theta', which is -1"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor', which is missing"),
        (LLAMA | {"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' needs a positive number 'factor'"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be_served(tmp_path, config, part):
    assert part in refused(tmp_path, config, load_format="dummy")


def test_old_and_new_spelling_of_rope_scaling_are_the_same(tmp_path):
    old = LLAMA | {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}
    frequencies = [load(tmp_path, c, load_format="dummy").rotary.inv_freq for c in (old, new)]
    assert torch.equal(*frequencies)


def test_more_positions_than_the_model_has_are_refused(tmp_path):
    message = refused(tmp_path, GPT2, load_format="dummy", max_model_len=17)
    assert "max_model_len is 17, but this GPT2LMHeadModel has 16 positions; set --max-model-len 16" in message


def test_a_model_too_large_for_memory_is_refused_before_memory_is_taken(tmp_path):
    config = LLAMA | {"hidden_size": 2**15, "intermediate_size": 2**24}
    message = refused(tmp_path, config, load_format="dummy")
    found = re.search(
        r"needs ([\d.]+) GiB in float32 for its parameters, but 1.00 GiB are free on cpu; with --dtype bfloat16 "
        r"([\d.]+) GiB, too much as well; with --quantization int8 about ([\d.]+) GiB, too much as well; else a model "
        r"of at most 268.4 million parameters, or more memory",
        message,
    )
    assert found
    whole, half, quarter = map(float, found.groups())
    assert (half, quarter) == pytest.approx((whole / 2, whole / 4), abs=0.1)


def test_dummy_weights_depend_on_seed_and_name_alone(tmp_path, config):
    first, again, other = (load(tmp_path, config, load_format="dummy", seed=seed) for seed in (3, 3, 4))
    names = [name for name, _ in first.named_parameters()]
    for name in names:
        assert torch.equal(first.get_parameter(name), again.get_parameter(name))
        assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    deeper = dict(config)
    deeper["n_layer" if "n_embd" in config else "num_hidden_layers"] = 3
    more = load(tmp_path, deeper, load_format="dummy", seed=3)
    assert all(torch.equal(first.get_parameter(name), more.get_parameter(name)) for name in names)


def test_a_checkpoint_on_disk_may_change_after_loading(tmp_path, config):
    tensors = tensors_of(config)
    model = load(write(tmp_path, config, tensors))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert same(model, tensors)
