"""Configurations and checkpoints as they were written before transformers 5: they mean the same model."""

import json

import numpy as np
import pytest
import torch
from checkpoints import FULL, GEMMA3, SLIDING, VARIANTS, YARN_ROPE, load, make
from safetensors.torch import load_file, save_file

from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.attention.torch_backend import TorchAttentionBackend


def logits(model, tokens):
    """Of every position of one prompt: ``[len(tokens), vocab_size]``."""
    n = len(tokens)
    spec = model.kv_cache_spec
    table, slots = torch.arange(1, n + 1, dtype=torch.int32)[None], torch.arange(1, n + 1, dtype=torch.int32)
    metadata = AttentionMetadata(1, table, slots, np.array([0, n], np.int32), np.array([n], np.int32))
    caches = [torch.zeros(spec.layer_shape(n + 1, 1)) for _ in range(spec.num_layers)]
    plan = TorchAttentionBackend(spec, torch.float32).plan(metadata)
    with torch.inference_mode():
        return model.compute_logits(model(torch.tensor(tokens), torch.arange(n, dtype=torch.int32), caches, plan))


@torch.no_grad()
def expected_logits(reference, tokens):
    return reference(torch.tensor([tokens])).logits[0]


TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()
LONG = {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 1.7, 3.0, 9.0]}


@pytest.mark.parametrize(
    ("variant", "removed", "added"),
    [
        ("llama-rope-linear", ["rope_parameters"], {"rope_scaling": {"type": "linear", "factor": 4}}),
        ("gpt-neox", ["rope_parameters"], {"rotary_pct": 0.25, "rotary_emb_base": 10000}),
        (
            "gpt-neox-sequential-tied", ["rope_parameters", "head_dim"], {"rotary_pct": 0.5, "rotary_emb_base": 10000},
        ),
        ("phi3-longrope", ["rope_parameters"], {"rope_theta": 1e4, "rope_scaling": {"type": "su", **LONG}}),
        ("phi3-longrope", ["rope_parameters"], {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **LONG}}),
        (
            "phi3-partial", ["rope_parameters"],
            {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.75},
        ),
        ("qwen2-tied-window", ["layer_types"], {}),
        ("qwen3-window", ["layer_types"], {}),
        ("qwen3-moe", ["num_local_experts"], {"num_experts": 6}),
        ("qwen3-moe", ["num_local_experts", "mlp_only_layers"], {"num_experts": 6, "mlp_only_layers": None}),
        ("qwen2-moe", ["layer_types", "rope_parameters", "mlp_only_layers", "norm_topk_prob", "qkv_bias"], {}),
        ("qwen2-moe-some-layers-normed-tied-window", ["layer_types"], {}),
        ("glm4-moe", ["rope_parameters", "n_group", "topk_group", "norm_topk_prob"], {"rope_theta": 1e4}),
        ("dots1", ["layer_types", "rope_parameters", "norm_topk_prob", "n_group"], {"rope_theta": 1e4}),
        ("dots1-groups-normed-window", ["layer_types"], {}),
        ("mixtral", ["rope_parameters"], {}),
        ("mixtral", ["rope_parameters", "sliding_window"], {"rope_theta": 1e6}),
        ("gpt-oss", ["layer_types", "rope_parameters", "head_dim"], {"head_dim": 8}),
        (
            "gpt-oss", ["rope_parameters", "swiglu_alpha"],
            {
                "rope_theta": 150000,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
        ),
        ("gemma2", ["layer_types", "rope_parameters", "final_logit_softcapping"], {"rope_theta": 10000.0}),
        ("smollm3", ["no_rope_layers", "layer_types", "rope_parameters"], {"rope_theta": 2e6}),
        ("smollm3", ["no_rope_layers", "layer_types", "rope_parameters", "tie_word_embeddings"], {}),
        ("granite", ["rope_parameters"], {"rope_theta": 1e4, "rope_scaling": None}),
        ("olmo2", ["rope_parameters"], {"rope_theta": 1e4}),
        ("olmo3", ["layer_types", "rope_parameters"], {}),
        (
            "olmo3-layer-types-yarn", ["rope_parameters"],
            {"rope_theta": 1e4, "rope_scaling": {k: v for k, v in YARN_ROPE.items() if k != "rope_theta"}},
        ),
        (
            "gemma3", ["layer_types", "rope_parameters", "_sliding_window_pattern"],
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3},
        ),
        (
            "gemma3-scaled-capped", ["layer_types", "rope_parameters"],
            {
                "rope_theta": 5e5, "rope_local_base_freq": 1e3, "sliding_window_pattern": 3,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)  # fmt: skip
def test_older_configurations(variant, removed, added, tmp_path):
    reference = make(*VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in removed} | added))
    torch.testing.assert_close(logits(load(tmp_path), TOKENS), expected_logits(reference, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("variant", "extra"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        (
            "gpt-neox",
            [
                "gpt_neox.layers.1.attention.bias", "gpt_neox.layers.1.attention.masked_bias",
                "gpt_neox.layers.1.attention.rotary_emb.inv_freq",
            ],
        ),
    ],
)  # fmt: skip
def test_what_older_checkpoints_carry_along_is_ignored(variant, extra, tmp_path):
    reference = make(*VARIANTS[variant])
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.full((3,), 7.0) for name in extra}, file)
    torch.testing.assert_close(logits(load(tmp_path), TOKENS), expected_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_names_without_the_prefix(tmp_path):
    reference = make(*VARIANTS["opt"])
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    torch.testing.assert_close(logits(load(tmp_path), TOKENS), expected_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_text_part_of_a_gemma_3_that_sees(tmp_path):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    reference = make("gemma3", {"layer_types": [SLIDING, SLIDING, FULL, FULL]})
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = GEMMA3 | {"layer_types": [SLIDING, SLIDING, FULL, FULL]}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    whole = Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(reference.model.state_dict())
    whole.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith("vision_tower.") for name in names)
    torch.testing.assert_close(logits(load(tmp_path), TOKENS), expected_logits(reference, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_model_len", [40, 32])
def test_dynamic_rope_stretches_to_the_longest_sequence(max_model_len, tmp_path):
    """Beyond the trained length transformers stretches to the sequence at hand, here to the longest one served."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    reference = make("llama", {"max_position_embeddings": 32, "rope_parameters": rope})
    reference.save_pretrained(tmp_path)
    tokens = TOKENS[:max_model_len]
    model = load(tmp_path, max_model_len=max_model_len)
    torch.testing.assert_close(logits(model, tokens), expected_logits(reference, tokens), atol=1e-4, rtol=0)


def test_short_factors_up_to_the_trained_length_in_every_batch(tmp_path):
    reference = make(*VARIANTS["phi3-longrope"])
    reference.save_pretrained(tmp_path)
    short = load(tmp_path, max_model_len=16)
    torch.testing.assert_close(logits(short, TOKENS[:16]), expected_logits(reference, TOKENS[:16]), atol=1e-4, rtol=0)
    long = load(tmp_path, max_model_len=17)
    torch.testing.assert_close(logits(long, TOKENS[:17]), expected_logits(reference, TOKENS[:17]), atol=1e-4, rtol=0)
    assert not torch.allclose(logits(long, TOKENS[:16]), logits(short, TOKENS[:16]), atol=1e-2)
