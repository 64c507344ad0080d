"""Makes GGUF files out of transformers' models and tokenizers, as llama.cpp's converter does."""

import json

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

# module of a transformers model -> name in a file; what stands before the layers' differs
ROTARY = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up", "input_layernorm": "attn_norm",
}  # fmt: skip
EXPERTS = {
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{shared}.{kind}_proj": f"ffn_{kind}_shexp"
        for shared in ("shared_expert", "shared_experts") for kind in ("gate", "up", "down")
    },
}  # fmt: skip
LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
GPT_OSS = {
    "post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks", "mlp.router": "ffn_gate_inp",
}  # fmt: skip
GPT2 = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
AROUND = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
}  # fmt: skip
INTERLEAVED = ("granite", "llama", "smollm3")
SCALES = {
    Type.Q4_K: ((0, 2e-4), (2, 1.5e-3)),
    Type.Q5_K: ((0, 1e-4), (2, 1.5e-3)),
    Type.Q6_K: ((208, 4e-5),),
    Type.IQ4_NL: ((0, 4e-4),),
}
"""Where the 16-bit scales of a block lie, and values that make numbers of a weight's size."""


def arch_of(model):
    names = {
        "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "mixtral": "llama", "qwen3_moe": "qwen3moe", "olmo3": "olmo2",
        "qwen2_moe": "qwen2moe", "glm4_moe": "glm4moe",
    }  # fmt: skip
    return names.get(model.config.model_type, model.config.model_type)


def file_name(name, arch):
    """From transformers' name of a tensor to the file's."""
    if name.endswith(".sinks"):
        name = f"{name}.weight"
    if name.endswith(".e_score_correction_bias"):
        name = f"{name}.bias"
    module, _, kind = name.rpartition(".")
    if module in AROUND:
        return f"{AROUND[module]}.{kind}"
    layer, _, module = module.split("layers." if arch != "gpt2" else "h.")[1].partition(".")
    late = arch.startswith(("gemma", "olmo"))
    norms = GPT_OSS if arch in ("gpt-oss", "glm4moe") else GEMMA_NORMS if late else LLAMA_NORMS
    names = GPT2 if arch == "gpt2" else ROTARY | EXPERTS | norms
    return f"blk.{layer}.{names[module]}.{kind}"


def interleave(array, heads):
    """What llama.cpp's converter does to the rows of queries and keys."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def deinterleave(array, heads):
    return array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def blocks_of(array, kind, rng):
    """An array in blocks: rounded by the gguf package where that can, else random blocks of its shape."""
    if kind not in SCALES:
        return gguf.quants.quantize(array, kind)
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (array.size // block, num_bytes), np.uint8)
    for place, scale in SCALES[kind]:
        values = (rng.uniform(0.5, 1.0, len(blocks)) * scale).astype(np.float16)
        blocks[:, place : place + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*array.shape[:-1], -1)


@torch.no_grad()
def write_model(path, model, kind_of, *, seed=0, metadata=lambda _: None):
    """Write a transformers model, and give it the numbers that the file has.

    Args:
        path: of the file.
        model: changed to what the file's blocks say.
        kind_of: from a tensor's name in the file to its type; tensors of one dimension stay F32.
        metadata: is given the writer, for more keys.
    """
    arch, config, rng = arch_of(model), model.config, np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    write_config(writer, config, arch)
    metadata(writer)
    tied = config.tie_word_embeddings
    for name, parameter in stored_parameters(model):
        if (tied and name == "lm_head.weight") or name.endswith((".attn.bias", "masked_bias", "inv_freq")):
            continue
        stored_name = file_name(name, arch)
        array = parameter.float().numpy().copy()
        is_turned = arch == "gpt2" and array.ndim == 2 and stored_name.startswith("blk.")
        heads = 0
        if arch in INTERLEAVED and ".attn_q." in stored_name:
            heads = config.num_attention_heads
        elif arch in INTERLEAVED and ".attn_k." in stored_name:
            heads = config.num_key_value_heads
        is_gemma_norm = arch.startswith("gemma") and stored_name.endswith("norm.weight")
        array = array.T.copy() if is_turned else array + 1 if is_gemma_norm else array
        array = interleave(array, heads) if heads else array
        is_vector = array.ndim < 2 or stored_name.endswith((".bias", "ffn_gate_inp_shexp.weight"))
        kind = Type.F32 if is_vector else Type[kind_of(stored_name)]
        if kind == Type.F32:
            stored = array.squeeze(0) if stored_name.endswith("ffn_gate_inp_shexp.weight") else array
            writer.add_tensor(stored_name, stored)
        elif kind == Type.F16:
            stored = array.astype(np.float16)
            writer.add_tensor(stored_name, stored)
        else:
            blocks = blocks_of(array, kind, rng)
            stored = gguf.quants.dequantize(blocks, kind)
            writer.add_tensor(stored_name, blocks, raw_dtype=kind)
        back = stored.astype(np.float32).reshape(array.shape)
        back = deinterleave(back, heads) if heads else back
        back = back.T if is_turned else back - 1 if is_gemma_norm else back
        parameter.copy_(torch.from_numpy(back.copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_parameters(model):
    """Names and parameters; where transformers stacks gates and features of experts in one, each by itself."""
    for name, parameter in model.state_dict().items():
        module, _, kind = name.rpartition(".experts.")
        if module and kind.endswith("_bias"):  # gpt-oss: gates and features in turns
            parts = {"gate": parameter[:, ::2], "up": parameter[:, 1::2]} if "gate" in kind else {"down": parameter}
            yield from ((f"{module}.experts.{part}_proj.bias", own) for part, own in parts.items())
        elif module and model.config.model_type == "gpt_oss":  # and inputs first
            turned = parameter.transpose(1, 2)
            parts = {"gate": turned[:, ::2], "up": turned[:, 1::2]} if "gate" in kind else {"down": turned}
            yield from ((f"{module}.experts.{part}_proj.weight", own) for part, own in parts.items())
        elif kind == "gate_up_proj":
            gate, up = parameter.chunk(2, dim=1)
            yield f"{module}.experts.gate_proj.weight", gate
            yield f"{module}.experts.up_proj.weight", up
        else:
            yield f"{name}.weight" if kind == "down_proj" else name, parameter


def write_config(writer, config, arch):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if arch in ("qwen2moe", "qwen3moe", "glm4moe", "dots1"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch in ("glm4moe", "dots1"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_array(
            f"{arch}.attention.sliding_window_pattern", [t == "sliding_attention" for t in config.layer_types]
        )
        rope = rope["full_attention"]
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(config, head_dim))
        elif rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        elif rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def llama3_factors(config, head_dim):
    """What llama.cpp's converter makes of Llama 3.1's settings: a factor for each frequency."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


def write_tokenizer(writer, folder, pre, *, template=None):
    """The tokenizer of a folder, as llama.cpp's converter writes it.

    Args:
        writer: of the file.
        folder: with ``tokenizer.json`` and ``tokenizer_config.json``.
        pre: how text is cut; None: SentencePiece, which has scores.
        template: the chat template, if there is one.
    """
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    added = {token["content"]: token for token in content["added_tokens"]}
    ids = content["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    kinds = [kind_of_token(token, added, pre) for token in tokens]
    writer.add_tokenizer_model("llama" if pre is None else "gpt2")
    if pre is None:
        writer.add_token_scores(scores_of(tokens, content["model"]["merges"]))
    else:
        writer.add_tokenizer_pre(pre)
        merges = content["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, add in (
        ("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id), ("pad_token", writer.add_pad_token_id),
    ):  # fmt: skip
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value in ids:
            add(ids[value])
    if isinstance(config.get("add_bos_token"), bool):
        writer.add_add_bos_token(config["add_bos_token"])
    if template or config.get("chat_template"):
        writer.add_chat_template(template or config["chat_template"])


def scores_of(tokens, merges):
    """Scores from which the merges follow: a piece's is its rank; runs of spaces have the lowest, as Llama's do."""
    pieces = ["".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    ranks = {piece: rank for rank, piece in reversed(list(enumerate(pieces)))}
    return [-1e9 if set(token) == {"\u2581"} and len(token) > 1 else -float(ranks.get(token, 0)) for token in tokens]


def kind_of_token(token, added, pre):
    if pre is None and token == "<unk>":
        return gguf.TokenType.UNKNOWN
    if pre is None and token.startswith("<0x") and len(token) == 6:
        return gguf.TokenType.BYTE
    if token in added:
        return gguf.TokenType.CONTROL if added[token]["special"] else gguf.TokenType.USER_DEFINED
    return gguf.TokenType.NORMAL
