"""Tiny random checkpoints made with transformers, and transformers' own answers to compare with."""

import json
from types import SimpleNamespace

import numpy as np
import torch

from rustvllm.config import LoadConfig
from rustvllm.config.architectures import text_config
from rustvllm.distributed.rank_group import ALONE
from rustvllm.model_loader import load_model

NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = {
    "vocab_size": 97, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, **NO_IDS,
}  # fmt: skip
MHA = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
OPT = {
    "vocab_size": 97, "hidden_size": 32, "ffn_dim": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, **NO_IDS,
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "head_dim": 12, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
QWEN2_MOE = LLAMA | {
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2,
    "sliding_window": 6,
}  # fmt: skip
GLM4_MOE = LLAMA | {
    "head_dim": 12, "partial_rotary_factor": 0.5, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
DOTS1 = LLAMA | {
    "head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "sliding_window": None,
}  # fmt: skip
GPT_OSS = LLAMA | {
    "head_dim": 8, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6,
    "layer_types": None,
}  # fmt: skip
GEMMA = LLAMA | {"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 6}
GEMMA3 = GEMMA | {"num_hidden_layers": 4, "layer_types": None, "sliding_window_pattern": 3}
SMOLLM3 = LLAMA | {"no_rope_layer_interval": 2}
GRANITE = LLAMA | {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.25, "logits_scaling": 0.5,
}  # fmt: skip
OLMO3 = LLAMA | {"num_hidden_layers": 4, "layer_types": None, "sliding_window": 6}
ARCHITECTURES = {
    # kind -> transformers' configuration, its model, a base configuration
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "mistral": ("MistralConfig", "MistralForCausalLM", LLAMA | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LLAMA | {"head_dim": 12}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3_MOE),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", MIXTRAL),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", QWEN2_MOE),
    "glm4-moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", GLM4_MOE),
    "dots1": ("Dots1Config", "Dots1ForCausalLM", DOTS1),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", GPT_OSS),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", LLAMA),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", SMOLLM3),
    "granite": ("GraniteConfig", "GraniteForCausalLM", GRANITE),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", LLAMA),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", OLMO3),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", MHA),
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 1.7, 3.0, 9.0],
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"

VARIANTS = {
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2-gelu-inner": ("gpt2", {"activation_function": "gelu", "n_inner": 40}),
    "gpt2-scalings": ("gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 12}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-rope-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-rope-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama-rope-yarn-mscale": (
        "llama", {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-window": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied-yarn": (
        "qwen3", {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN_ROPE},
    ),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe-one-of-many": ("qwen3-moe", {"num_experts": 9, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    "qwen3-moe-all-biases-tied-window": (
        "qwen3-moe",
        {
            "num_experts_per_tok": 6, "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True,
            "use_sliding_window": True, "sliding_window": 5,
        },
    ),
    "qwen3-moe-some-layers": (
        "qwen3-moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts_per_tok": 4},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window-tied": ("mixtral", {"sliding_window": 7, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2-moe": ("qwen2-moe", {}),
    "qwen2-moe-some-layers-normed-tied-window": (
        "qwen2-moe",
        {
            "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True,
            "qkv_bias": False, "tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 3,
        },
    ),
    "glm4-moe": ("glm4-moe", {}),
    "glm4-moe-groups-norms-biases": (
        "glm4-moe",
        {
            "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1, "use_qk_norm": True,
            "attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 0,
        },
    ),
    "dots1": ("dots1", {}),
    "dots1-groups-normed-window": (
        "dots1",
        {
            "n_group": 3, "topk_group": 2, "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True,
            "sliding_window": 7, "max_window_layers": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 2,
        },
    ),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss-all-experts-tied-full": (
        "gpt-oss",
        {
            "num_experts_per_tok": 5, "tie_word_embeddings": True, "attention_bias": False, "head_dim": 12,
            "layer_types": [FULL, FULL, SLIDING], "sliding_window": 9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": ("phi3", {"num_key_value_heads": 4}),
    "phi3-window-tied": ("phi3", {"sliding_window": 9, "tie_word_embeddings": True}),
    # transformers chooses the factors by the length of the sequence: long ones for all that is longer than 16 here.
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "phi3-longrope-short": ("phi3", {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE}),
    "phi3-partial": (
        "phi3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-uncapped-untied": (
        "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma2-strong-caps": (
        "gemma2",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "layer_types": [FULL, SLIDING, SLIDING]},
    ),
    "gemma3": ("gemma3", {}),
    "gemma3-scaled-capped": (
        "gemma3",
        {
            "final_logit_softcapping": 5.0, "attention_bias": True, "num_key_value_heads": 1,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                SLIDING: {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-listed-window-biases-untied": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5, "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": False,
        },
    ),
    "granite": ("granite", {}),
    "granite-biases-tied-thirds": (
        "granite",
        {
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "logits_scaling": 0.3,
            "residual_multiplier": 1.5,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-mha-biases": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True, "num_hidden_layers": 4}),
    "olmo3": ("olmo3", {}),
    "olmo3-layer-types-yarn": (
        "olmo3",
        {
            "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL],
            "rope_parameters": {FULL: YARN_ROPE, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}},
        },
    ),
    "opt": ("opt", {}),
    "opt-post-norm-projected": (
        "opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
    ),
    "opt-bare": (
        "opt",
        {
            "enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    "opt-no-final-norm": ("opt", {"_remove_final_layer_norm": True}),
    "gpt-neox": ("gpt-neox", {}),
    "gpt-neox-sequential-tied": (
        "gpt-neox",
        {
            "use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
}  # fmt: skip


def make(kind, options, *, seed=0):
    """A transformers model whose weights are scaled so that greedy output is diverse."""
    import transformers

    config_name, model_name, base = ARCHITECTURES[kind]
    config = getattr(transformers, config_name)(**(base | options))
    # Its default attention leaves soft caps out.
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config).eval()
    scale_weights(model)
    return model


@torch.no_grad()
def scale_weights(model):
    """Blocks outweigh the embedding, and biases and norms are no longer zeros and ones."""
    embeddings = {
        "wte.weight", "wpe.weight", "embed_tokens.weight", "embed_positions.weight", "embed_in.weight",
        "lm_head.weight",
    }  # fmt: skip
    kind = type(model).__name__
    normless = getattr(model.config, "_remove_final_layer_norm", False)
    post_norm = not getattr(model.config, "do_layer_norm_before", True)
    for name, parameter in model.named_parameters():
        if any(name.endswith(end) for end in embeddings):
            parameter.normal_(std=0.05 if parameter.shape[1] >= 256 or normless else 0.1)
            if post_norm:  # nothing norms them, so they must matter next to the blocks
                parameter.mul_(3)
        elif name.endswith("sinks"):  # as large as the scores are: without them the softmax is another
            parameter.normal_(std=1.5)
        elif name.endswith("_proj_bias"):  # of all experts; gates and features are so far from 0 that some are cut
            parameter.normal_(std=3.0)
        elif parameter.dim() >= 2:  # a map, or those of all experts
            is_turned = kind.startswith("GPT2") or (kind.startswith("GptOss") and parameter.dim() == 3)
            fan_in = parameter.shape[-2] if is_turned else parameter.shape[-1]
            parameter.normal_(std=(1.0 if post_norm else 2.5) * fan_in**-0.5)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        else:
            # Gemma adds one to them itself; its blocks are weighed by the norms behind them.
            parameter.normal_(std=0.1).add_(0.0 if kind.startswith("Gemma") and ".post_" not in name else 1.0)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # so large that it chooses others than the scores do
            buffer.normal_(std=0.4)


def load(folder, *, max_model_len=128, dtype=torch.float32, device="cpu", load_format="auto", seed=0, group=ALONE):
    """Load a checkpoint's folder as the engine would, or the part of it that is a rank's."""
    hf_config = text_config(json.loads((folder / "config.json").read_text()))
    config = SimpleNamespace(
        model=str(folder), path=folder, hf_config=hf_config, architecture=hf_config["architectures"][0],
        max_model_len=max_model_len, seed=seed, model_impl="rustvllm", pooler=None,
    )  # fmt: skip
    return load_model(config, LoadConfig(load_format=load_format), dtype, torch.device(device), 1 << 30, None, group)


def prompts(vocab_size, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


class Remembered:
    """A reference whose answers are kept: greedy requests that are cut in other ways ask it for the same again.

    It must not change afterwards.
    """

    def __init__(self, reference):
        self._reference, self._answers = reference, {}

    def __call__(self, ids):
        key = tuple(map(tuple, ids.tolist()))
        if key not in self._answers:
            self._answers[key] = self._reference(ids)
        return self._answers[key]


@torch.no_grad()
def oracle_logits(reference, tokens, num_prompt_tokens):
    """transformers' logits at every step after the prompt: ``[num_outputs, vocab_size]``."""
    logits = reference(torch.tensor([tokens[:-1]])).logits[0]
    return logits[num_prompt_tokens - 1 :].float()


def assert_matches(reference, request, *, atol=1e-4, margin=1e-3):
    """Every step's logits equal transformers', and its token is the argmax wherever the margin is clear."""
    expected = oracle_logits(reference, request.tokens, len(request.prompt))
    actual = torch.stack(request.logits)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > margin
    chosen = torch.tensor(request.output)
    assert torch.equal(chosen[clear], expected.argmax(-1)[clear])
    return int(clear.sum())


def assert_diverse(outputs):
    """Greedy output that repeats itself proves nothing."""
    flat = [token for output in outputs for token in output]
    assert len(set(flat)) >= 20, f"only {len(set(flat))} different ids among {len(flat)}"
    assert np.mean([len(set(output)) / len(output) for output in outputs]) > 0.35
