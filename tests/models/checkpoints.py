"""Tiny random checkpoints made with transformers, and transformers' own answers to compare with."""

import json
from types import SimpleNamespace

import numpy as np
import torch

from rustvllm.config import LoadConfig
from rustvllm.model_loader import load_model

GPT2 = {
    "vocab_size": 97, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip

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
}  # fmt: skip


def make(kind, options, *, seed=0):
    """A transformers model whose weights are scaled so that greedy output is diverse."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    config_class, model_class, base = {
        "gpt2": (GPT2Config, GPT2LMHeadModel, GPT2),
        "llama": (LlamaConfig, LlamaForCausalLM, LLAMA),
    }[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**(base | options))).eval()
    scale_weights(model)
    return model


@torch.no_grad()
def scale_weights(model):
    """Blocks outweigh the embedding, and biases and norms are no longer zeros and ones."""
    embeddings = {"wte.weight", "wpe.weight", "embed_tokens.weight", "lm_head.weight"}
    for name, parameter in model.named_parameters():
        if any(name.endswith(end) for end in embeddings):
            parameter.normal_(std=0.1 if parameter.shape[1] < 256 else 0.05)
        elif parameter.dim() == 2:
            fan_in = parameter.shape[0] if type(model).__name__.startswith("GPT2") else parameter.shape[1]
            parameter.normal_(std=2.5 * fan_in**-0.5)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        else:
            parameter.normal_(std=0.1).add_(1.0)


def load(folder, *, max_model_len=128, dtype=torch.float32, device="cpu", load_format="auto", seed=0):
    """Load a checkpoint's folder as the engine would."""
    hf_config = json.loads((folder / "config.json").read_text())
    config = SimpleNamespace(
        model=str(folder), path=folder, hf_config=hf_config, architecture=hf_config["architectures"][0],
        max_model_len=max_model_len, seed=seed, model_impl="rustvllm",
    )  # fmt: skip
    return load_model(config, LoadConfig(load_format=load_format), dtype, torch.device(device), 1 << 30)


def prompts(vocab_size, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


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
