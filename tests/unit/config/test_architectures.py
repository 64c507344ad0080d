"""What configurations leave unsaid, and the text model of one that takes pictures too."""

import ast
import json
import re

import pytest

from rustvllm.config.architectures import ARCHITECTURES, MODEL_TYPES, SUPPORTED_ARCHITECTURES, text_config
from rustvllm.config.model_folder import find_architecture, read_model_config
from rustvllm.exceptions import ModelLoadError

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def read(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model_config(tmp_path, model="m")


@pytest.mark.parametrize(
    ("architecture", "extra", "kv_heads", "head_dim"),
    [
        ("OPTForCausalLM", {"num_key_value_heads": 2}, 8, 8),
        ("GPTNeoXForCausalLM", {}, 8, 8),
        ("MistralForCausalLM", {"num_key_value_heads": 2}, 2, 8),
        ("Qwen2ForCausalLM", {"num_key_value_heads": 1}, 1, 8),
        ("Qwen3ForCausalLM", {"num_key_value_heads": 2}, 2, 128),
        ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}, 2, 16),
        ("Qwen3MoeForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}, 2, 16),
        ("MixtralForCausalLM", {"num_key_value_heads": 2, "head_dim": None}, 2, 8),
        ("GptOssForCausalLM", {"num_key_value_heads": 2}, 2, 64),
        ("Phi3ForCausalLM", {}, 8, 8),
        ("SmolLM3ForCausalLM", {"num_key_value_heads": 2}, 2, 8),
        ("GraniteForCausalLM", {"num_key_value_heads": 2}, 2, 8),
        ("Olmo3ForCausalLM", {"num_key_value_heads": None}, 8, 8),
        ("Gemma2ForCausalLM", {"num_key_value_heads": 4}, 4, 256),
        ("Gemma3ForCausalLM", {"num_key_value_heads": 4, "head_dim": None}, 4, 256),
    ],
)
def test_sizes_of_heads(tmp_path, architecture, extra, kv_heads, head_dim):
    config = read(tmp_path, SIZES | {"architectures": [architecture]} | extra)
    assert (config.architecture, config.num_kv_heads, config.head_dim) == (architecture, kv_heads, head_dim)
    assert config.max_model_len == 512


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_model_types_are_those_of_transformers(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert model_type in CONFIG_MAPPING_NAMES


def test_every_model_type_has_an_architecture_of_its_own(tmp_path):
    assert len(SUPPORTED_ARCHITECTURES) == len(set(SUPPORTED_ARCHITECTURES)) == len(MODEL_TYPES) >= 11
    for model_type, architecture in MODEL_TYPES.items():
        assert architecture in str(find_architecture({"model_type": model_type}, tmp_path))


@pytest.mark.parametrize(
    "architecture",
    [
        "Dots1ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
    ],
)  # fmt: skip
def test_experts_run_by_transformers_code_on_other_devices(architecture, tmp_path):
    config = {"architectures": [architecture]}
    assert find_architecture(config, tmp_path) == (architecture, "rustvllm")
    assert find_architecture(config, tmp_path, "auto", "cuda") == (architecture, "transformers")
    assert find_architecture({"architectures": ["LlamaForCausalLM"]}, tmp_path, "auto", "cuda")[1] == "rustvllm"
    with pytest.raises(ModelLoadError, match=f"{architecture}, which rustvllm's own code only runs on the CPU, but"):
        find_architecture(config, tmp_path, "rustvllm", "cuda")


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_row_leads_to_its_class(architecture):
    from rustvllm.models.registry import get_model_class

    found = get_model_class(architecture)
    assert (found.__name__, found.__module__) == (architecture, f"rustvllm.models.{ARCHITECTURES[architecture].module}")


def test_the_registry_imports_no_model_of_its_own(repository):
    tree = ast.parse((repository / "python/rustvllm/models/registry.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "rustvllm.models.interface" in imported
    assert imported & {f"rustvllm.models.{row.module}" for row in ARCHITECTURES.values()} == set()


def test_the_page_on_loading_has_the_same_rows(repository):
    page = (repository / "docs" / "loading.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `models/([\w/]+)\.py` \|$", page, re.MULTILINE)
    assert rows == [
        (row.name, row.model_type, row.module.replace(".", "/")) for _, row in sorted(ARCHITECTURES.items())
    ]
    guide = (repository / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    assert [name for name in ARCHITECTURES if f"`{name}`" not in guide] == []


GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}


def test_text_model_of_gemma_3(tmp_path):
    config = read(tmp_path, GEMMA3)
    assert config.architecture == "Gemma3ForConditionalGeneration"
    assert (config.hidden_size, config.num_layers) == (2560, 34), "not the vision tower's"
    assert (config.vocab_size, config.num_attention_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.max_model_len == 131_072, "max_position_embeddings counts the scaling already"
    assert config.eos_token_ids == (1, 106)
    assert config.hf_config["rope_scaling"] == {"factor": 8.0, "rope_type": "linear"}
    assert text_config(config.hf_config) == config.hf_config, "taken apart once"


@pytest.mark.parametrize(
    "config",
    [{}, {"architectures": "Gemma3ForConditionalGeneration"}, {"architectures": [3], "text_config": {"a": 1}}, SIZES],
)
def test_other_configurations_stay(config):
    assert text_config(config) == config


def test_a_text_config_of_the_wrong_kind_is_not_read(tmp_path):
    with pytest.raises(ModelLoadError, match="lacks vocab_size"):
        read(tmp_path, GEMMA3 | {"text_config": [1]})
