"""With ``batch_invariant`` a request's logits have the same bits alone, with others, in pieces and after preemption."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import GPT2, LLAMA
from naive_schedule import NaiveEngine, Request

from rustvllm import _core
from rustvllm.config import DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from rustvllm.layers.cpu.norm import use_core_norms
from rustvllm.layers.linear import Linear
from rustvllm.model_loader import load_model
from rustvllm.worker.cpu_decoder import use_core_decoder
from rustvllm.worker.dense_layers import make_linear_packer

NUM_REQUESTS = 64
# Widths that fill no whole number of vectors.
SMALL_GPT2 = GPT2 | {"n_embd": 36, "n_head": 3, "n_inner": 101}
SMALL_LLAMA = LLAMA | {"hidden_size": 36, "intermediate_size": 53, "head_dim": 12}
SMALL_OSS = SMALL_LLAMA | {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 9}
SMALL_GLM = SMALL_LLAMA | {
    "moe_intermediate_size": 45, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip
SMALL_QWEN2_MOE = SMALL_LLAMA | {
    "moe_intermediate_size": 45, "shared_expert_intermediate_size": 53, "num_experts": 7, "num_experts_per_tok": 3,
}  # fmt: skip
SMALL_MOE = SMALL_LLAMA | {"moe_intermediate_size": 45, "num_experts": 7, "num_experts_per_tok": 3}


@pytest.fixture(
    scope="module",
    params=[
        "gpt2",
        "gpt2-bfloat16",
        "gpt2-int8",
        "gpt2-int8-float",
        "llama",
        "llama-bfloat16",
        "llama-int8-g32",
        "llama-int4-g32",
        "gpt2-int4-g128",
        "llama-int4-g64-float",
        "qwen3",
        "moe",
        "moe-bfloat16",
        "moe-int8",
        "moe-int4-g32",
        "shared",
        "shared-bfloat16",
        "shared-int4-g32",
        "glm",
        "glm-bfloat16",
        "glm-int8",
        "oss",
        "oss-bfloat16",
        "oss-int8",
        "oss-int4-g32",
        "neox",
        "neox-bfloat16",
        "neox-int8",
        "neox-int4-g32",
        "gemma2",
        "gemma2-int8",
        "gemma3-bfloat16",
        "gemma3-int4-g32",
        "granite",
        "olmo3",
        "olmo3-int8",
    ],
)
def model(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSTVLLM_ACTIVATIONS", "float" if "float" in request.param.split("-") else "int8")
        return make_model(request.param)


def make_model(name):
    base, architecture = {
        "gpt2": (SMALL_GPT2, "GPT2LMHeadModel"),
        "llama": (SMALL_LLAMA, "LlamaForCausalLM"),
        "qwen3": (SMALL_LLAMA, "Qwen3ForCausalLM"),
        "moe": (SMALL_MOE, "Qwen3MoeForCausalLM"),
        "shared": (SMALL_QWEN2_MOE, "Qwen2MoeForCausalLM"),
        "glm": (SMALL_GLM, "Glm4MoeForCausalLM"),
        "oss": (SMALL_OSS, "GptOssForCausalLM"),
        "neox": (SMALL_LLAMA | {"num_attention_heads": 3, "rotary_pct": 0.5}, "GPTNeoXForCausalLM"),
        "gemma2": (SMALL_LLAMA | {"sliding_window": 9}, "Gemma2ForCausalLM"),
        "granite": (SMALL_LLAMA | {"embedding_multiplier": 3.0, "residual_multiplier": 0.2}, "GraniteForCausalLM"),
        "olmo3": (SMALL_LLAMA | {"sliding_window": 9}, "Olmo3ForCausalLM"),
        "gemma3": (SMALL_LLAMA | {"sliding_window": 9, "sliding_window_pattern": 2}, "Gemma3ForCausalLM"),
    }[name.partition("-")[0]]
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    quantization = name.partition("-")[2].removesuffix("-float") if "int" in name else None
    config = EngineConfig(
        model=ModelConfig(
            model="m", path=Path("/nowhere"), hf_config=base, architecture=architecture, max_model_len=128,
            vocab_size=97, hidden_size=36, num_layers=3, num_attention_heads=4, num_kv_heads=2, head_dim=8,
        ),
        load=LoadConfig(load_format="dummy", quantization=quantization),
        device=DeviceConfig(batch_invariant=True),
    )  # fmt: skip
    threads = _core.CpuThreads(2)
    model = load_model(
        config.model, config.load, dtype, torch.device("cpu"), 1 << 40,
        lambda outline: make_linear_packer(config, outline, dtype, threads),
    )  # fmt: skip
    use_core_norms(model, threads)
    use_core_decoder(model)
    if quantization is not None:
        bits = quantization[3]
        rounded = [module for module in model.modules() if isinstance(module, Linear) and not module.keeps_numbers]
        assert {module.kernel.packed.kind for module in rounded} == {f"int{bits}" if "float" in name else f"w{bits}a8"}
    assert model.decoder_kernel is not None
    return model


def requests(indices, **options):
    """The same requests, whatever else is in the batch: prompts of 1 to 50 tokens."""
    made = []
    for index in indices:
        rng = np.random.default_rng(index)
        made.append(Request(rng.integers(3, 97, int(rng.integers(1, 50))).tolist(), 6, **options))
    return made


def logits_of(model, wanted, **options):
    engine = NaiveEngine(model, num_blocks=1000, **options)
    return [torch.stack(request.logits) for request in engine.run(wanted)]


@pytest.mark.parametrize("cache_dtype", [None, torch.bfloat16, torch.int8])
def test_company_pieces_and_preemption_change_no_bit(model, cache_dtype):
    cache = {"cache_dtype": cache_dtype}
    together = logits_of(model, requests(range(NUM_REQUESTS)), **cache)
    some = [0, 7, 31, 63]
    assert all(len(together[index]) == 6 for index in some)
    for index in some:
        (alone,) = logits_of(model, requests([index]), **cache)
        assert torch.equal(alone, together[index])
    for chunk in (1, 7, 16):
        for index, pieces in zip(some, logits_of(model, requests(some), chunk=chunk, **cache), strict=True):
            assert torch.equal(pieces, together[index])
    preempted = requests(some, preempt_at=(2, 4))
    for index, resumed in zip(some, logits_of(model, preempted, chunk=9, **cache), strict=True):
        assert torch.equal(resumed, together[index])
    assert all(request.num_preemptions == 2 for request in preempted)
