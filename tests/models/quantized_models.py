"""Small models of every family in folders as AWQ, GPTQ and compressed-tensors write them."""

import numpy as np
from checkpoints import ARCHITECTURES, GEMMA, GEMMA3, GPT2, GRANITE, LLAMA, OLMO3, SMOLLM3, make

from quantized_files import meaning, random_layer, write_folder

SIZES = {"hidden_size": 64, "intermediate_size": 128}
FAMILIES = {
    # kind of checkpoint -> what its configuration has besides
    "gpt2": GPT2 | {"n_embd": 64},
    "llama": LLAMA | SIZES | {"attention_bias": True},
    "mistral": LLAMA | SIZES | {"tie_word_embeddings": True},
    "qwen2": LLAMA | SIZES | {"tie_word_embeddings": True},
    "qwen3": LLAMA | SIZES | {"head_dim": 24, "num_attention_heads": 8},
    "phi3": LLAMA | SIZES,
    "gemma2": GEMMA | SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3": GEMMA3 | SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "smollm3": SMOLLM3 | SIZES,
    "granite": GRANITE | SIZES,
    "olmo3": OLMO3 | SIZES,
    "opt": {**ARCHITECTURES["opt"][2], "hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt-neox": ARCHITECTURES["gpt-neox"][2] | SIZES,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def compressed(form, *, bits, group_size, symmetric=True, kind="int", **weights):
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric} | weights
    weights |= {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def write(folder, family, config, lay_out, *, bits=4, group_size=32, symmetric=False, acts=False, seed=0, **options):
    """A folder of a family; ``lay_out`` makes the tensors of a layer. ``acts``: groups by an order of the inputs."""
    rng, orders = np.random.default_rng(seed), {}

    def make_layer(name, weight):
        order = None
        if acts:  # the same for all that read one input, as tools that sort by its size have it
            order = orders.setdefault((name.rpartition(".")[0], weight.shape[1]), rng.permutation(weight.shape[1]))
        parts = random_layer(rng, weight, bits, group_size, symmetric=symmetric, order=order)
        return lay_out(name, *parts), meaning(*parts)

    return write_folder(folder, make(family, FAMILIES[family]), config, make_layer, **options)
