"""What a GGUF file's metadata becomes, and what is refused by name before any weight is read."""

import json

import gguf
import numpy as np
import pytest

from rustvllm.config.engine_args import EngineArgs
from rustvllm.config.model_folder import read_model_config
from rustvllm.exceptions import ConfigError, ModelLoadError, ModelNotFoundError

BASE = {
    "context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
    "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


def write(path, *, arch="llama", values=BASE, keys=None, kind="F32"):
    writer = gguf.GGUFWriter(path, arch)
    for name, value in values.items():
        writer.add_uint32(f"{arch}.{name}", value)
    for name, value in (keys or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_array if isinstance(value, list) else None
        (add or (writer.add_float32 if isinstance(value, float) else writer.add_uint32))(name, value)
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if kind == "F32":
        writer.add_tensor("token_embd.weight", np.zeros((97, 32), np.float32))
    else:
        rows = np.zeros((97, -(-32 // block) * num_bytes), np.uint8)
        writer.add_tensor("token_embd.weight", rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_becomes_a_configuration(tmp_path):
    keys = {
        "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>", "<|x|>"], "tokenizer.ggml.token_type": [1, 1, 3, 3],
        "tokenizer.ggml.eos_token_id": 1, "general.sampling.temp": 0.5, "general.sampling.top_k": 7,
    }  # fmt: skip
    config = read_model_config(write(tmp_path / "m.gguf", keys=keys), model="m")
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.max_model_len, config.num_kv_heads, config.head_dim) == (97, 64, 2, 8)
    assert config.eos_token_ids == (1, 2), "a control token that ends a turn ends it"
    assert dict(config.generation_config) == {"temperature": 0.5, "top_k": 7}
    assert config.hf_config["tie_word_embeddings"]


def test_metadata_of_gpt_oss(tmp_path):
    keys = {
        "tokenizer.ggml.tokens": ["a", "<|end|>", "<|return|>", "<|call|>", "<|im_end|>", "<|endoftext|>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 3, 3], "tokenizer.ggml.eos_token_id": 2,
        "gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 32.0,
        "gpt-oss.rope.scaling.original_context_length": 4096, "gpt-oss.rope.freq_base": 150000.0,
    }  # fmt: skip
    experts = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 24}
    values = BASE | experts | {"attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 16}
    config = read_model_config(write(tmp_path / "m.gguf", arch="gpt-oss", values=values, keys=keys), model="m")
    assert config.architecture == "GptOssForCausalLM"
    assert config.eos_token_ids == (2, 3, 5), "a message that ends does not end the turn"
    found = config.hf_config
    assert (found["intermediate_size"], found["num_local_experts"], found["num_experts_per_tok"]) == (24, 5, 2)
    assert (found["sliding_window"], found["rope_theta"], found["attention_bias"]) == (16, 150000.0, False)
    assert found["rope_scaling"] == {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
    }  # fmt: skip
    del values["attention.sliding_window"]
    with pytest.raises(ModelLoadError, match=r"gpt-oss.attention.sliding_window must be a positive number, got None"):
        read_model_config(write(tmp_path / "m.gguf", arch="gpt-oss", values=values, keys=keys), model="m")


EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24}


def test_metadata_of_qwen2_moe(tmp_path):
    values = BASE | EXPERTS | {"expert_shared_feed_forward_length": 40}
    config = read_model_config(write(tmp_path / "m.gguf", arch="qwen2moe", values=values), model="m")
    assert config.architecture == "Qwen2MoeForCausalLM"
    found = config.hf_config
    assert (found["moe_intermediate_size"], found["shared_expert_intermediate_size"]) == (24, 40)
    assert (found["norm_topk_prob"], found["qkv_bias"], found["mlp_only_layers"]) == (False, False, [0, 1])
    with pytest.raises(ModelLoadError, match=r"qwen2moe.expert_shared_feed_forward_length must be a positive number"):
        read_model_config(write(tmp_path / "m.gguf", arch="qwen2moe", values=BASE | EXPERTS), model="m")


def test_metadata_of_experts_behind_sigmoids(tmp_path):
    values = BASE | EXPERTS | {
        "expert_shared_count": 1, "leading_dense_block_count": 1, "nextn_predict_layers": 1, "rope.dimension_count": 4,
        "expert_group_count": 3, "expert_group_used_count": 2,
    }  # fmt: skip
    keys = {"glm4moe.expert_weights_scale": 2.5}
    config = read_model_config(write(tmp_path / "m.gguf", arch="glm4moe", values=values, keys=keys), model="m")
    assert config.architecture == "Glm4MoeForCausalLM"
    assert config.num_layers == 1, "the file counts the layer that predicts a further token"
    found = config.hf_config
    assert (found["n_routed_experts"], found["n_shared_experts"], found["first_k_dense_replace"]) == (6, 1, 1)
    assert (found["routed_scaling_factor"], found["partial_rotary_factor"], found["use_qk_norm"]) == (2.5, 0.5, False)
    assert (found["n_group"], found["topk_group"], found["num_nextn_predict_layers"]) == (3, 2, 1)
    keys = {"dots1.expert_weights_scale": 0.0}
    config = read_model_config(write(tmp_path / "m.gguf", arch="dots1", values=BASE | EXPERTS, keys=keys), model="m")
    assert config.architecture == "Dots1ForCausalLM"
    found = config.hf_config
    assert (found["routed_scaling_factor"], found["n_shared_experts"], found["sliding_window"]) == (1.0, 0, None)
    for changes, says in (
        (
            {"nextn_predict_layers": 2},
            "glm4moe.nextn_predict_layers must be 0 to 1, fewer than glm4moe.*, got 2",
        ),
        (
            {"expert_gating_func": 1},
            r"glm4moe.expert_gating_func is 1, which is not supported; supported: 2",
        ),
        ({"expert_used_count": 0}, "glm4moe.expert_used_count must be a positive number, got 0"),
    ):
        path = write(tmp_path / "m.gguf", arch="glm4moe", values=values | changes)
        with pytest.raises(ModelLoadError, match=says):
            read_model_config(path, model="m")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"arch": "mamba"},
            "'mamba', which rustvllm does not support as GGUF; supported: dots1, gemma2, gemma3, glm4moe, gpt-oss",
        ),
        (
            {"kind": "IQ4_XS"},
            "1 tensors (token_embd.weight, …) have the type IQ4_XS, which is not supported; supported: F32",
        ),
        ({"kind": "TQ1_0"}, "TQ1_0"),
        (
            {"arch": "qwen2", "values": {**BASE, "expert_count": 8}},
            "a mixture-of-experts model (qwen2.expert_count) of the architecture 'qwen2', which rustvllm does not",
        ),
        ({"values": {**BASE, "expert_count": 8}}, "llama.expert_used_count must be a positive number, got None"),
        ({"values": {**BASE, "attention.value_length": 4}}, "keys have 8 features, but values have 4"),
        (
            {"values": {k: v for k, v in BASE.items() if k != "block_count"}},
            "llama.block_count must be a positive number",
        ),
        ({"keys": {"general.type": "adapter"}}, "does not hold a model: its general.type is 'adapter'"),
        ({"keys": {"llama.rope.scaling.type": "odd"}}, "llama.rope.scaling.type is 'odd'"),
        ({"keys": {"llama.rope.dimension_count": 7}}, "llama.rope.dimension_count must be an even number from 2 to 8"),
        ({"keys": {"llama.rope.dimension_count": 10}}, "must be an even number from 2 to 8, the features of a head"),
        ({"keys": {"tokenizer.ggml.tokens": [1, 2]}}, "tokenizer.ggml.tokens must be a list of texts, got [1, 2]"),
        ({"values": {**BASE, "attention.head_count_kv": 3}}, "num_attention_heads (4) must be a multiple of"),
        ({"values": {**BASE, "block_count": 5000}}, "num_hidden_layers is 5000, but the limit is 4096 layers"),
        (
            {"values": {**BASE, "context_length": 2**32 - 1}},
            "max_position_embeddings is 4294967295, but may be at most",
        ),
        (
            {"keys": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": float("inf")}},
            "rope type 'linear' needs a positive number 'factor', which is inf",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(options, says, tmp_path):
    with pytest.raises(ModelLoadError) as caught:
        read_model_config(write(tmp_path / "m.gguf", **options), model="m")
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "m.gguf"))
    assert "config.json" not in str(caught.value), "there is no such file"


def test_the_file_that_an_error_names_is_the_one_that_was_read(tmp_path):
    config = read_model_config(write(tmp_path / "m.gguf", keys={"tokenizer.ggml.eos_token_id": 97}), model="m")
    assert config.config_file == tmp_path / "m.gguf"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(dict(config.hf_config) | {"num_hidden_layers": 0}))
    with pytest.raises(
        ModelLoadError, match=r"other/config\.json: num_hidden_layers must be a positive integer, got 0"
    ):
        read_model_config(tmp_path / "m.gguf", model="m", hf_config_path=tmp_path / "other")


def test_a_folder_without_the_first_of_several_files(tmp_path):
    write(tmp_path / "m-00002-of-00003.gguf")
    with pytest.raises(ModelNotFoundError, match=r"but the first file, m-00001-of-00003\.gguf, is missing: fetch it"):
        EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, device="cpu").create_engine_config()


def test_a_damaged_file_is_refused_with_its_name(tmp_path):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"m\.gguf: the tensor \"token_embd.weight\" ends at byte .* truncated"):
        read_model_config(path, model="m")
    with pytest.raises(ModelLoadError, match=r"none\.gguf: cannot be read"):
        read_model_config(tmp_path / "none.gguf", model="m")


def test_another_configuration_counts_where_it_is_named(tmp_path):
    path = write(tmp_path / "m.gguf")
    (tmp_path / "other").mkdir()
    other = dict(read_model_config(path, model="m").hf_config) | {"max_position_embeddings": 48}
    (tmp_path / "other/config.json").write_text(json.dumps(other))
    arguments = {"model": str(path), "skip_tokenizer_init": True, "device": "cpu"}
    assert EngineArgs(**arguments).create_engine_config().model.max_model_len == 64
    config = EngineArgs(**arguments, hf_config_path=str(tmp_path / "other")).create_engine_config()
    assert config.model.max_model_len == 48
    assert EngineArgs(**arguments, quantization="gguf").create_engine_config().load.quantization == "gguf"


def test_settings_that_contradict_the_file_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="quantization is gguf, but rustvllm-tiny is not a GGUF file"):
        EngineArgs(quantization="gguf", device="cpu").create_engine_config()
    with pytest.raises(ConfigError, match=r"model_impl is transformers, but m\.gguf is a GGUF file"):
        read_model_config(write(tmp_path / "m.gguf"), model="m", model_impl="transformers")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"quant_method": "awq", "bits": 8}, "this checkpoint is AWQ of 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, "this checkpoint is GPTQ of 3 bits"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "this checkpoint is bitsandbytes nf4",
        ),
        ({"quant_method": "new"}, "this checkpoint is new"),
    ],
)
def test_other_quantised_folders_are_refused_with_what_works(how, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": how}))
    with pytest.raises(ModelLoadError) as caught:
        read_model_config(tmp_path, model="m")
    assert says in str(caught.value)
    assert "Use a GGUF file" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "how", "says"),
    [
        (
            "awq",
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            "is awq, but .* is GPTQ of 4 bits, groups of 32",
        ),
        ("gguf", {"quant_method": "gptq", "bits": 4, "group_size": 32}, "is gguf, but .* is not a GGUF file"),
        ("gptq_marlin", None, "is gptq, but .* is not quantised"),
        (
            "compressed-tensors",
            {"quant_method": "fp8"},
            r"is compressed-tensors, but .* is FP8 of 8 bits \(quant_method 'fp8' in its config",
        ),
    ],
)
def test_contradictions_name_both(asked, how, says, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SMALL
    (tmp_path / "config.json").write_text(json.dumps(config | ({"quantization_config": how} if how else {})))
    arguments = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match=f"quantization {says}"):
        EngineArgs(**arguments, quantization=asked).create_engine_config()
    agreed = {"gptq": "gptq_marlin"}.get(how["quant_method"], how["quant_method"]) if how else None
    EngineArgs(**arguments, quantization=agreed).create_engine_config()
    with pytest.raises(ConfigError, match=r"quantization is awq, but .*m\.gguf is a GGUF file"):
        EngineArgs(
            model=str(write(tmp_path / "m.gguf")), quantization="awq", device="cpu", skip_tokenizer_init=True
        ).create_engine_config()
