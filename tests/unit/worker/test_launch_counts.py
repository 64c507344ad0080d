"""How many kernels a decode launches on a GPU: each costs some microseconds, however small it is."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not made for this platform", allow_module_level=True)

import naive_schedule
from fake_cuda import DEVICE, FakeCuda, use_fake_cuda
from naive_schedule import NaiveEngine, Request

from rustvllm.models.gemma3 import Gemma3ForCausalLM
from rustvllm.models.gpt2 import GPT2LMHeadModel
from rustvllm.models.gpt_neox import GPTNeoXForCausalLM
from rustvllm.models.granite import GraniteForCausalLM
from rustvllm.models.llama import LlamaForCausalLM, SmolLM3ForCausalLM
from rustvllm.models.olmo2 import Olmo2ForCausalLM
from rustvllm.models.opt import OPTForCausalLM
from rustvllm.models.qwen3 import Qwen3ForCausalLM

ROTARY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 97, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS, OUTSIDE = 2, 8
CASES = {
    # name -> model, configuration, launches of a layer at most, and of all that is not a layer
    "llama": (LlamaForCausalLM, ROTARY, 9, OUTSIDE),
    "qwen3": (Qwen3ForCausalLM, ROTARY, 9, OUTSIDE),
    "gemma3": (Gemma3ForCausalLM, ROTARY | {"query_pre_attn_scalar": 16, "sliding_window": 8}, 9, OUTSIDE + 1),
    "smollm3": (SmolLM3ForCausalLM, ROTARY, 9, OUTSIDE),
    "granite": (GraniteForCausalLM, ROTARY | {"logits_scaling": 8.0}, 9, OUTSIDE + 2),
    "olmo2": (Olmo2ForCausalLM, ROTARY, 16, OUTSIDE),
    "gpt2": (GPT2LMHeadModel, {"n_embd": 64, "n_head": 4, "vocab_size": 97, "n_positions": 1024}, 9, OUTSIDE + 2),
    "gpt-neox": (GPTNeoXForCausalLM, ROTARY | {"rotary_pct": 0.25}, 10, OUTSIDE),
    "opt": (OPTForCausalLM, ROTARY | {"ffn_dim": 96, "max_position_embeddings": 1024}, 9, OUTSIDE + 3),
}


def launches(monkeypatch, model_class, config, num_layers, context):
    """Names of what a greedy decode of two requests launches."""
    cuda = FakeCuda()
    use_fake_cuda(monkeypatch, cuda)
    monkeypatch.setattr(naive_schedule, "make_streams", lambda device: cuda.streams)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with cuda, torch.device(DEVICE):
            model = model_class({**config, "num_hidden_layers": num_layers, "n_layer": num_layers}, 1024)
    finally:
        torch.set_default_dtype(torch.float32)
    with cuda:
        engine = NaiveEngine(model, block_size=16, max_model_len=1024, attention_backend="triton")
        engine.capture_logits = False
        engine.admit([Request([5] * context, 4), Request([7, 8, 9], 4)])
        engine.step()  # prompts
        engine.step()  # what is made once
        with cuda.watch():
            engine.step()
    assert cuda.faults == []
    return cuda.launches + cuda.operations


@pytest.mark.parametrize(("name", "context"), [*((name, 600) for name in CASES), ("llama", 5)])
def test_a_decode_launches_no_more_than_this(monkeypatch, name, context):
    """A context of 600 tokens is read in parts, one of 5 is not."""
    model, config, per_layer, outside = CASES[name]
    two, three = (launches(monkeypatch, model, config, LAYERS + more, context) for more in (0, 1))
    of_layer = len(three) - len(two)
    assert "_attention_kernel" in two, "the step was watched"
    assert of_layer <= per_layer
    assert len(two) - LAYERS * of_layer <= outside
