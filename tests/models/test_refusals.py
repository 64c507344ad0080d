"""What a configuration asks for that is not built: refused by name and value, before any memory is taken."""

import math

import pytest
import torch
from checkpoints import ARCHITECTURES, FULL, LONGROPE, SLIDING

from rustvllm.config.architectures import SUPPORTED_ARCHITECTURES
from rustvllm.config.vision.folder import VISION_ARCHITECTURES
from rustvllm.exceptions import ModelLoadError
from rustvllm.models.registry import get_model_class

BASES = {model: base for _, model, base in ARCHITECTURES.values()}


def build(architecture, changes):
    with torch.device("meta"):
        return get_model_class(architecture)(BASES[architecture] | changes, 128)


def test_the_bases_are_good_and_cover_every_architecture():
    # tests/models/test_vision.py has those that see.
    assert BASES.keys() | VISION_ARCHITECTURES == set(SUPPORTED_ARCHITECTURES)
    for architecture in BASES:
        assert build(architecture, {}).kv_cache_spec.num_layers >= 3


@pytest.mark.parametrize("architecture", sorted(BASES))
def test_quantised_weights(architecture):
    with pytest.raises(ModelLoadError, match=r"'quantization_config' = .*gptq.* is not supported"):
        build(architecture, {"quantization_config": {"quant_method": "gptq"}})


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {"hidden_act": "frog"}, "activation function 'frog' is not supported; supported: gelu"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of"),
        ("LlamaForCausalLM", {"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ("LlamaForCausalLM", {"intermediate_size": None}, "required key 'intermediate_size' is missing"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported for this"),
        (
            "LlamaForCausalLM", {"rope_parameters": {FULL: {"rope_type": "default"}}},
            "for each type of layer .full_attention. are not supported for this architecture",
        ),
        (
            "LlamaForCausalLM", {"rope_parameters": {"rope_type": "axial"}},
            "rope type 'axial' is not supported; supported: default, linear, dynamic, llama3, yarn, longrope",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "'linear' needs a positive number 'factor'"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": "2"}}, "'factor', which is '2'"),
        ("LlamaForCausalLM", {"rope_theta": -1}, "needs a positive number 'rope_theta', which is -1"),
        (
            "LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}},
            "needs a positive number 'beta_fast', which is -1",
        ),
        (
            "LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": [1]}},
            r"needs a positive number 'attention_factor', which is \[1\]",
        ),
        (
            "LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": math.inf}},
            "needs a positive number 'mscale', which is inf",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1}, "rope_theta above 1"),
        ("MistralForCausalLM", {"sliding_window": 0}, "'sliding_window' must be an integer of at least 1, .* got 0"),
        ("MistralForCausalLM", {"sliding_window": "7"}, "'sliding_window' must be an integer .* got '7'"),
        ("Phi3ForCausalLM", {"sliding_window": -1}, "'sliding_window' must be an integer of at least 1, .* got -1"),
        ("MistralForCausalLM", {"layer_types": [FULL, FULL]}, "'layer_types' must list a type for each of 3 layers"),
        (
            "MistralForCausalLM", {"layer_types": [FULL, "chunked_attention", FULL]},
            r"'layer_types'\[1\] = 'chunked_attention' is not supported; supported: 'full_attention', 'sliding",
        ),
        (
            "MistralForCausalLM", {"layer_types": [FULL, SLIDING, FULL]},
            "layer 1 has 'sliding_attention', but 'sliding_window' is not set",
        ),
        (
            "Qwen2ForCausalLM", {"layer_types": [SLIDING] * 3, "sliding_window": 7},
            "'use_sliding_window' is not true; set both or none",
        ),
        ("Qwen3ForCausalLM", {"max_window_layers": -1}, "'max_window_layers' must be an integer"),
        ("Qwen3ForCausalLM", {"attention_bias": "yes"}, "'attention_bias' must be true or false, got 'yes'"),
        ("Qwen3MoeForCausalLM", {"num_experts": None}, "'num_local_experts' or 'num_experts' is missing"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 7}, r"_tok \(7\) must be at most the number of experts \(6"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "'decoder_sparse_step' must be an integer from 1 to"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1, "2"]}, "'mlp_only_layers' must be a list of numbers of layers"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": 1}, "'norm_topk_prob' must be true or false, got 1"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}, "key 'moe_intermediate_size' is missing"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 0}, "'num_experts_per_tok' must be an integer from 1 to"),
        ("Qwen2MoeForCausalLM", {"num_experts": 0}, "'num_experts' must be an integer from 1 to 16777216, got 0"),
        ("Qwen2MoeForCausalLM", {"num_experts_per_tok": 7}, r"_tok \(7\) must be at most the number of experts \(6"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": None}, "key 'shared_expert_intermediate_size' is"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": -4}, "'shared_expert_intermediate_size' must be"),
        ("Qwen2MoeForCausalLM", {"qkv_bias": "yes"}, "'qkv_bias' must be true or false, got 'yes'"),
        ("Qwen2MoeForCausalLM", {"layer_types": [SLIDING] * 3}, "'use_sliding_window' is not true; set both or none"),
        (
            "Qwen2MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 0},
            "'sliding_window' must be an integer of at least 1, or null, got 0",
        ),
        ("Glm4MoeForCausalLM", {"n_group": 3}, r"n_group \(3\) must divide the number of experts \(8\) into groups"),
        ("Glm4MoeForCausalLM", {"n_group": 8}, r"n_group \(8\) must divide the number of experts \(8\) into groups"),
        ("Glm4MoeForCausalLM", {"n_group": 2, "topk_group": 3}, r"topk_group \(3\) must be at most n_group \(2\)"),
        (
            "Glm4MoeForCausalLM", {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            r"num_experts_per_tok \(3\) must be at most 2, the experts of topk_group \(1\) groups",
        ),
        ("Glm4MoeForCausalLM", {"n_routed_experts": None}, "'n_routed_experts' or 'num_local_experts' is missing"),
        ("Glm4MoeForCausalLM", {"n_shared_experts": -1}, "'n_shared_experts' must be an integer from 1 to"),
        ("Glm4MoeForCausalLM", {"routed_scaling_factor": math.nan}, "'routed_scaling_factor' must be a positive"),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": "1"}, "'first_k_dense_replace' must be an integer from 1 to"),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.1}, "factor 0.1 rotates 1 of 12 features of a head"),
        ("Dots1ForCausalLM", {"num_experts_per_tok": 7}, r"_tok \(7\) must be at most the number of experts \(6"),
        ("Dots1ForCausalLM", {"layer_types": [SLIDING] * 3}, "layer 0 has 'sliding_attention', but 'sliding_window'"),
        ("MixtralForCausalLM", {"num_local_experts": 1 << 30}, "'num_local_experts' must be an integer from 1 to"),
        ("MixtralForCausalLM", {"hidden_act": "frog"}, "activation function 'frog' is not supported"),
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "'swiglu_limit' = 5.0 is not supported; supported: 7.0"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.0}, "'swiglu_alpha' = 1.0 is not supported; supported: 1.702"),
        ("GptOssForCausalLM", {"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported; supported: 'silu'"),
        ("GptOssForCausalLM", {"sliding_window": None}, "layer 0 has 'sliding_attention', but 'sliding_window' is not"),
        ("GptOssForCausalLM", {"num_experts_per_tok": 6}, r"_tok \(6\) must be at most the number of experts \(5"),
        (
            "Phi3ForCausalLM",
            {"original_max_position_embeddings": 16, "rope_scaling": LONGROPE | {"long_factor": [1.0, 2.0]}},
            r"'longrope' needs 4 positive numbers in 'long_factor', got \[1.0, 2.0\]",
        ),
        (
            "Phi3ForCausalLM", {"rope_scaling": LONGROPE | {"short_factor": None}, "max_position_embeddings": 64},
            "'longrope' needs 4 positive numbers in 'short_factor', got None",
        ),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.4}, "factor 0.4 rotates 3 of 8 features of a head"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "rotates 12 of 8 features"),
        ("GPTNeoXForCausalLM", {"rotary_pct": 0.01}, "rotates 0 of 8 features"),
        ("GPTNeoXForCausalLM", {"num_attention_heads": 5}, r"hidden_size \(32\) must be a multiple of num_attention_h"),
        ("OPTForCausalLM", {"num_attention_heads": 5}, r"hidden_size \(32\) must be a multiple of num_attention_head"),
        ("OPTForCausalLM", {"ffn_dim": 1 << 30}, "'ffn_dim' must be an integer from 1 to 16777216, got 1073741824"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' = True is not"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "'attn_logit_softcapping' must be a positive number"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' must be a positive number, got 0"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "layer 0 has 'sliding_attention', but 'sliding_window' is not"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' = 50.0 is not supported"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "must hold an object for each type"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "'sliding_window_pattern' must be an integer from 1"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "'no_rope_layers' must list 0 or 1 for each of 3 layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 2]}, r"'no_rope_layers' must list 0 or 1 .* got \[1, 0, 2\]"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": "110"}, "'no_rope_layers' must list 0 or 1 .* got 110"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "'no_rope_layer_interval' must be an integer from 1 to"),
        (
            "SmolLM3ForCausalLM", {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 7},
            "'use_sliding_window' is not true; set both or none",
        ),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "'residual_multiplier' must be a positive number, got 0"),
        ("GraniteForCausalLM", {"residual_multiplier": "0.2"}, "'residual_multiplier' must be a positive number, got"),
        ("GraniteForCausalLM", {"embedding_multiplier": math.nan}, "'embedding_multiplier' must be a positive number"),
        ("GraniteForCausalLM", {"attention_multiplier": -1}, "'attention_multiplier' must be a positive number, got"),
        ("GraniteForCausalLM", {"logits_scaling": math.inf}, "'logits_scaling' must be a positive number, got inf"),
        ("Olmo2ForCausalLM", {"clip_qkv": 8.0}, "'clip_qkv' = 8.0 is not supported; supported: None"),
        ("Olmo3ForCausalLM", {"sliding_window": None}, "layer 0 has 'sliding_attention', but 'sliding_window' is not"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "must hold an object for each type"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "'add_cross_attention' = True is not supported"),
    ],
)  # fmt: skip
def test_by_name_and_value(architecture, changes, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        build(architecture, changes)
    assert "config.json" in str(caught.value) or "activation" in str(caught.value)


def test_settings_that_change_nothing_here_are_not_refused():
    build("Qwen2ForCausalLM", {"sliding_window": 7, "max_window_layers": 0})  # not in use
    build("Gemma2ForCausalLM", {"use_bidirectional_attention": None, "attention_dropout": 0.1})
    build("MistralForCausalLM", {"layer_types": [FULL] * 5})  # more than there are layers
    for window in (129, 1 << 25, 2**63, 10**200):  # more than the longest sequence has tokens
        [first, *_] = build("MistralForCausalLM", {"sliding_window": window}).layers
        assert first.self_attn.sliding_window == min(window, 2**31 - 1)


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        ("Qwen2VLForConditionalGeneration", "Qwen2ForCausalLM"),
        ("Qwen2_5_VLForConditionalGeneration", "Qwen2ForCausalLM"),
        ("Qwen3VLForConditionalGeneration", "Qwen3ForCausalLM"),
    ],
)
def test_positions_of_three_parts(architecture, base):
    """They must cover the pairs of a head; only models that have them take what older files call a scaling."""
    config = BASES[base] | {"architectures": [architecture], "head_dim": 8}
    sections = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    with torch.device("meta"):
        model = get_model_class(architecture)(config | {"rope_scaling": sections}, 128)
        assert sorted(model.rotary.axes.tolist()) == [0, 0, 1, 2]
        for wrong in ([2, 1], [2, 2, 2], "abc", None):
            scaling = sections | {"mrope_section": wrong}
            with pytest.raises(ModelLoadError, match="mrope_section must be 3 integers whose sum is 4, half the feat"):
                get_model_class(architecture)(config | {"rope_scaling": scaling}, 128)
    with pytest.raises(ModelLoadError, match="rope type 'mrope' is not supported; supported: default"):
        build(base, {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}})
