"""A model's blocks in one call of the core: the same bits as module by module, and where the modules stay."""

import numpy as np
import pytest
import torch
from checkpoints import (
    DOTS1,
    FULL,
    GLM4_MOE,
    GPT2,
    GPT_OSS,
    LLAMA,
    QWEN2_MOE,
    QWEN3_MOE,
    SLIDING,
    YARN_ROPE,
)
from naive_schedule import NaiveEngine, Request

from rustvllm import _core
from rustvllm.attention.cpu_backend import CPUAttentionPlan
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.layers.cpu.linear import CoreLinear, LinearByRows, TorchLinear
from rustvllm.layers.cpu.norm import use_core_norms
from rustvllm.layers.linear import Linear
from rustvllm.layers.rotary import RotaryEmbedding, apply_rotary, section_axes
from rustvllm.models.gemma2 import Gemma2ForCausalLM
from rustvllm.models.gemma3 import Gemma3ForCausalLM
from rustvllm.models.gpt2 import GPT2LMHeadModel
from rustvllm.models.gpt_neox import GPTNeoXForCausalLM
from rustvllm.models.granite import GraniteForCausalLM
from rustvllm.models.llama import LlamaForCausalLM, SmolLM3ForCausalLM
from rustvllm.models.mistral import MistralForCausalLM
from rustvllm.models.moe.dots1 import Dots1ForCausalLM
from rustvllm.models.moe.glm4_moe import Glm4MoeForCausalLM
from rustvllm.models.moe.gpt_oss import GptOssForCausalLM
from rustvllm.models.moe.mixtral import MixtralForCausalLM
from rustvllm.models.moe.qwen2_moe import Qwen2MoeForCausalLM
from rustvllm.models.moe.qwen3_moe import Qwen3MoeForCausalLM
from rustvllm.models.olmo2 import Olmo2ForCausalLM, Olmo3ForCausalLM
from rustvllm.models.opt import OPTForCausalLM
from rustvllm.models.phi3 import Phi3ForCausalLM
from rustvllm.models.qwen2 import Qwen2ForCausalLM
from rustvllm.models.qwen3 import Qwen3ForCausalLM
from rustvllm.worker.cpu_decoder import use_core_decoder

OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 32, "ffn_dim": 70, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "vocab_size": 97, "word_embed_proj_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def threads():
    return _core.CpuThreads(2)


def make(threads, architecture, config, dtype=torch.float32, kind=None, kernel=CoreLinear):
    """A model with random weights whose layers are all the core's, or another's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    model = architecture(config, 128)
    torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    for module in model.modules():
        if isinstance(module, Linear):
            made = (threads, module.weight, module.bias, kind) if kernel is CoreLinear else (module.weight, module.bias)
            module.kernel = kernel(*made)
    use_core_norms(model, threads)
    return model


def logits(model, **options):
    rng = np.random.default_rng(3)
    wanted = [Request(rng.integers(3, 97, length).tolist(), 5) for length in (1, 6, 17, 40)]
    engine = NaiveEngine(model, **options)
    with torch.inference_mode():
        return [torch.stack(request.logits) for request in engine.run(wanted)]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, "int8"),
        (torch.float32, "w8a8"),
        (torch.bfloat16, "w8a8"),
    ],
)
@pytest.mark.parametrize("architecture", [GPT2LMHeadModel, OPTForCausalLM])
def test_one_call_has_the_bits_of_the_modules(threads, architecture, dtype, kind):
    model = make(threads, architecture, GPT2 if architecture is GPT2LMHeadModel else OPT, dtype, kind)
    expected = logits(model, chunk=16)
    use_core_decoder(model)
    assert model.decoder_kernel is not None
    for found, one_by_one in zip(logits(model, chunk=16), expected, strict=True):
        assert torch.equal(found, one_by_one)
    assert len(model.decoder_kernel.times) == 3
    assert all(ns > 0 for ns in model.decoder_kernel.times)


@pytest.mark.parametrize(
    ("dtype", "kind", "cache_dtype"),
    [
        (torch.float32, None, torch.bfloat16),
        (torch.float32, "w8a8", torch.bfloat16),
        (torch.float32, None, torch.int8),
        (torch.float32, "w8a8", torch.int8),
        (torch.bfloat16, None, torch.int8),
    ],
)
def test_one_call_has_the_bits_of_the_modules_over_a_smaller_cache(threads, dtype, kind, cache_dtype):
    model = make(threads, GPT2LMHeadModel, GPT2, dtype, kind)
    wide, expected = logits(model, chunk=16), logits(model, chunk=16, cache_dtype=cache_dtype)
    use_core_decoder(model)
    found = logits(model, chunk=16, cache_dtype=cache_dtype)
    assert all(ns > 0 for ns in model.decoder_kernel.times), "the modules ran"
    for ours, one_by_one, exact in zip(found, expected, wide, strict=True):
        assert torch.equal(ours, one_by_one)
        assert not torch.equal(ours[0], exact[0]), "the cache rounded nothing"
        torch.testing.assert_close(ours[0], exact[0], atol=0.05 * float(exact[0].abs().max()), rtol=0)


SIZES = LLAMA | {"hidden_size": 36, "intermediate_size": 53, "head_dim": 12}
NEOX = SIZES | {"num_attention_heads": 3, "rotary_pct": 0.5}  # heads of 12, of which 6 features turn
ROTARY = {
    "llama": (LlamaForCausalLM, SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": (LlamaForCausalLM, SIZES | {"rope_parameters": YARN_ROPE}),
    "mistral-window": (MistralForCausalLM, SIZES | {"sliding_window": 9}),
    "qwen2": (Qwen2ForCausalLM, SIZES),
    "qwen3": (Qwen3ForCausalLM, SIZES | {"head_dim": 16}),
    "qwen3-moe": (Qwen3MoeForCausalLM, QWEN3_MOE | SIZES | {"moe_intermediate_size": 21, "mlp_only_layers": [1]}),
    "mixtral": (MixtralForCausalLM, SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": (GptOssForCausalLM, GPT_OSS | SIZES | {"intermediate_size": 22, "sliding_window": 9}),
    "qwen2-moe": (
        Qwen2MoeForCausalLM,
        QWEN2_MOE | SIZES | {"moe_intermediate_size": 21, "shared_expert_intermediate_size": 37},
    ),
    "glm4-moe": (
        Glm4MoeForCausalLM,
        GLM4_MOE | SIZES | {"moe_intermediate_size": 21, "n_group": 4, "topk_group": 2, "use_qk_norm": True},
    ),
    "dots1": (Dots1ForCausalLM, DOTS1 | SIZES | {"moe_intermediate_size": 21, "sliding_window": 9}),
    "gpt-neox": (GPTNeoXForCausalLM, NEOX),
    "gpt-neox-one-after-the-other": (GPTNeoXForCausalLM, NEOX | {"use_parallel_residual": False, "hidden_act": "relu"}),
    "gemma2": (Gemma2ForCausalLM, SIZES | {"sliding_window": 9, "query_pre_attn_scalar": 10}),
    "gemma3": (Gemma3ForCausalLM, SIZES | {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 16}),
    "smollm3": (SmolLM3ForCausalLM, SIZES | {"no_rope_layer_interval": 2}),
    "granite": (GraniteForCausalLM, SIZES | {"residual_multiplier": 0.3, "embedding_multiplier": 4.0}),
    "olmo2": (Olmo2ForCausalLM, SIZES),
    "olmo3": (Olmo3ForCausalLM, SIZES | {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}),
    "phi3-partial": (Phi3ForCausalLM, SIZES | {"partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize(
    ("dtype", "kind", "atol"),
    [
        (torch.float32, None, 1e-5),
        (torch.float32, "int8", 1e-5),
        # A number that was nearly halfway between two whole ones may be rounded to the other.
        (torch.float32, "w8a8", 2e-2),
        (torch.bfloat16, None, 5e-2),
    ],
)
@pytest.mark.parametrize("variant", ROTARY)
def test_one_call_computes_what_rotary_modules_do(threads, variant, dtype, kind, atol):
    model = make(threads, *ROTARY[variant], dtype, kind)
    expected = logits(model, chunk=16)
    use_core_decoder(model)
    assert model.decoder_kernel is not None
    found = logits(model, chunk=16)
    assert all(ns > 0 for ns in model.decoder_kernel.times), "the modules ran"
    largest = max(float(one.float().abs().max()) for one in expected)
    for ours, one_by_one in zip(found, expected, strict=True):
        # The first step of a request has seen the same tokens; later ones follow what was drawn.
        torch.testing.assert_close(ours[0], one_by_one[0], atol=atol * largest, rtol=0)


def logits_of_one_call(model, places, *, chooses):
    """Two prompts in one step, up to the logits of some tokens."""
    spec = model.kv_cache_spec
    dtype = next(model.parameters()).dtype
    caches = [torch.zeros(spec.layer_shape(6, 16), dtype=dtype) for _ in range(spec.num_layers)]
    starts, lens = np.array([0, 17, 20], np.int32), np.array([17, 3], np.int32)
    table, slots = np.array([[1, 2], [3, 0]], np.int32), np.array([*range(16, 33), 48, 49, 50], np.int32)
    positions = torch.tensor([*range(17), *range(3)], dtype=torch.int32)
    ids = torch.from_numpy(np.random.default_rng(5).integers(3, 97, 20).astype(np.int32))
    plan = CPUAttentionPlan(_core.CpuAttention(2).plan(16, starts, lens, table, slots))
    with torch.inference_mode():
        found = model.forward_logits(ids, positions, caches, plan, places, chooses=chooses)
        hidden = model(ids, positions, caches, plan)
        return found, model.compute_logits(hidden if places is None else hidden[places.long()])


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "w8a8"), (torch.bfloat16, "w8a8")],
)
@pytest.mark.parametrize("variant", ["llama", "gpt-neox", "gemma2", "qwen3"])
def test_a_call_that_ends_in_logits_has_their_bits(threads, variant, dtype, kind):
    architecture, config = ROTARY[variant]
    model = make(threads, architecture, config | {"tie_word_embeddings": False}, dtype, kind)
    use_core_decoder(model)
    for places in (None, torch.tensor([16, 19], dtype=torch.int32), torch.tensor([19, 2, 7], dtype=torch.int32)):
        found, expected = logits_of_one_call(model, places, chooses=True)
        assert found is not None
        assert torch.equal(found.logits, expected)
        if variant == "gemma2":  # whose logits are capped after the call
            assert found.ids is None
        else:
            assert found.ids.tolist() == expected.float().numpy().argmax(-1).tolist()
        assert logits_of_one_call(model, places, chooses=False)[0].ids is None


def test_who_has_no_head_in_the_call(threads):
    tied = make(threads, GPT2LMHeadModel, GPT2)  # whose head torch computes
    use_core_decoder(tied)
    assert tied.decoder_kernel is not None
    found, expected = logits_of_one_call(tied, None, chooses=True)
    assert found is None
    assert bool(expected.isfinite().all())
    narrow = make(threads, OPTForCausalLM, OPT | {"word_embed_proj_dim": 16})
    narrow.head_kernel = CoreLinear(threads, narrow.embed_tokens.weight, None)
    use_core_decoder(narrow)
    assert narrow.decoder_kernel is not None
    assert logits_of_one_call(narrow, None, chooses=True)[0] is None
    tied.head_kernel = CoreLinear(threads, tied.embed_tokens.weight, None)
    use_core_decoder(tied)
    found, expected = logits_of_one_call(tied, None, chooses=True)
    assert torch.equal(found.logits, expected)


def test_the_environment_may_ask_for_the_modules(threads, monkeypatch):
    model = make(threads, *ROTARY["llama"])
    monkeypatch.setenv("RUSTVLLM_DECODER", "modules")
    use_core_decoder(model)
    assert model.decoder_kernel is None
    monkeypatch.setenv("RUSTVLLM_DECODER", "torch")
    with pytest.raises(ConfigError, match="RUSTVLLM_DECODER must be one of core, modules, got 'torch'"):
        use_core_decoder(model)


def test_other_attention_is_for_the_modules(threads):
    model = make(threads, GPT2LMHeadModel, GPT2)
    expected = logits(model, attention_backend="torch")
    use_core_decoder(model)
    model.decoder_kernel.times = None  # no step writes it
    for found, one_by_one in zip(logits(model, attention_backend="torch"), expected, strict=True):
        assert torch.equal(found, one_by_one)
    assert model.decoder_kernel.times is None


def test_rows_that_another_kernel_computes_are_for_the_modules(threads):
    model = make(threads, GPT2LMHeadModel, GPT2)
    linear = model.h[1].mlp.c_fc
    linear.kernel = LinearByRows([linear.kernel] * 3 + [TorchLinear(linear.weight, linear.bias)] * 6)
    use_core_decoder(model)
    kernel, plan = model.decoder_kernel, plan_of_one_token()
    assert [kernel.takes(rows, plan) for rows in (1, 4, 5, 300)] == [True, True, False, False]


@pytest.mark.parametrize("change", ["torch", "no kernel", "norm", "activation", "head norm", "norm after", "post-norm"])
def test_models_that_stay_with_their_modules(threads, change):
    if change == "norm after":
        model = make(threads, *ROTARY["gemma2"])
        model.layers[1].post_feedforward_layernorm.kernel = None
    elif change == "head norm":
        model = make(threads, *ROTARY["qwen3"])
        model.layers[1].self_attn.k_norm.kernel = None
    elif change == "post-norm":
        model = make(threads, OPTForCausalLM, OPT | {"do_layer_norm_before": False})
    else:
        config = GPT2 | ({"activation_function": "quick_gelu"} if change == "activation" else {})
        model = make(threads, GPT2LMHeadModel, config, kernel=TorchLinear if change == "torch" else CoreLinear)
    if change == "no kernel":
        model.h[0].attn.c_attn.kernel = None
    if change == "norm":
        model.ln_f.kernel = None
    use_core_decoder(model)
    assert model.decoder_kernel is None


AT_0 = np.zeros(1, np.int32)


def plan_of_one_token():
    ids = [np.array(values, np.int32) for values in ([0, 1], [1], [[1]], [16])]
    return CPUAttentionPlan(_core.CpuAttention(1).plan(16, *ids))


def core_decoder(threads, **changes):
    """One block 8 wide with one head, and its layers."""
    layers = {}
    for name, shape in {"qkv": (24, 8), "out": (8, 8), "up": (10, 8), "down": (8, 10)}.items():
        layers[name] = _core.PackedLinear(threads, *changes.get(name, shape), "f32")
        layers[name].pack_rows(0, np.ones(changes.get(name, shape), np.float32))
    norm = (np.ones(8, np.float32), None, 1e-5)
    mlp = {"is_gated": False, "activation": changes.get("activation", "relu"), "up": layers["up"]}
    block = {
        "attention_norm": norm, "mlp_norm": norm, "head_norms": None, "rotary": None, "scale": 1.0,
        "is_by_head": False, "is_parallel": False, "post_norms": None,
        "sliding_window": None, "soft_cap": None, "sinks": None, "qkv": layers["qkv"], "out": layers["out"],
        "dense": mlp | {"down": layers["down"]}, "experts": None,
    }  # fmt: skip
    block |= {name: value for name, value in changes.items() if name in block and name not in layers}
    options = {name: changes[name] for name in ("turns", "head") if name in changes}
    return _core.CpuDecoder([block], changes.get("norm", norm), 1, 1, 8, **options), layers


def test_what_the_core_refuses(threads):
    with pytest.raises(ValueError, match=r"block 0: qkv has 23 features, but 24 are needed"):
        core_decoder(threads, qkv=(23, 8))
    with pytest.raises(ValueError, match='activation is "tanh", but it must be one of none, relu'):
        core_decoder(threads, activation="tanh")
    with pytest.raises(ValueError, match="a block must have either dense or experts"):
        core_decoder(threads, dense=None)
    router = _core.PackedLinear(threads, 2, 8, "f32")
    routing = {
        "scores": "softmax", "num_chosen": 1, "bias": None, "num_groups": 1, "num_chosen_groups": 1, "is_normed": True,
        "scale": 1.0, "is_wide": False,
    }  # fmt: skip
    experts = {"router": router, "routing": routing, "experts": [], "shared": None}
    with pytest.raises(ValueError, match="block 0 has a router, but no experts"):
        core_decoder(threads, dense=None, experts=experts)
    with pytest.raises(ValueError, match='scores must be softmax or sigmoid, got "tanh"'):
        core_decoder(threads, dense=None, experts=experts | {"routing": routing | {"scores": "tanh"}})
    with pytest.raises(TypeError, match="the weight of a norm must be an array of float32"):
        core_decoder(threads, norm=(np.ones(8), None, 1e-5))
    with pytest.raises(ValueError, match=r"block 0 does not run in halves: more than sums with the stream"):
        core_decoder(threads, is_parallel=True)[0].multiply(plan_of_one_token().core, 0, np.ones((1, 8), np.float32))
    norms = {"post_norms": ((np.ones(8, np.float32), None, 1e-5), (np.ones(7, np.float32), None, 1e-5))}
    with pytest.raises(ValueError, match=r"block 0: the norm after the MLP has 7 features, but 8 are needed"):
        core_decoder(threads, **norms)
    with pytest.raises(ValueError, match="norms after them: it may have one of the two"):
        core_decoder(threads, is_parallel=True, **norms)
    decoder, layers = core_decoder(threads)
    with pytest.raises(RuntimeError, match="part of a decoder"):
        layers["up"].pack_rows(0, np.zeros((10, 8), np.float32))
    with pytest.raises(RuntimeError, match="part of a decoder"):
        layers["up"].set_bias(None)
    plan = plan_of_one_token().core
    hidden, out = np.ones((2, 1, 8), np.float32)
    cache = np.zeros((2, 4, 16, 1, 8), np.float32)
    decoder.forward(plan, hidden, AT_0, _core.CpuCaches([cache]), out)
    assert np.isfinite(out).all()
    assert cache[0, 1, 0].any()
    read_only = cache.copy()
    read_only.flags.writeable = False
    for bad, message in [
        ((np.ones((2, 8), np.float32), [cache], out), r"hidden has the shape \(2, 8\), but \(1, 8\) is needed"),
        ((hidden, [], out), "kv_caches is empty"),
        ((hidden, [cache, cache], out), "caches of 2 blocks are given, but there are 1 blocks"),
        ((hidden, [cache, cache[:, :2]], out), "differ in their shapes"),
        ((hidden, [read_only], out), "must be writable"),
        ((hidden, [cache[:, ::2]], out), "must be C-contiguous"),
        ((hidden, [np.zeros((2, 4, 16, 2, 4), np.float32)], out), "the caches have 2 heads of 4 features"),
        ((hidden, [np.zeros((2, 1, 16, 1, 8), np.float32)], out), "the batch names block 1"),
        ((hidden, [cache], hidden), "overlap, but some are written"),
    ]:
        hidden_of, caches, out_of = bad
        with pytest.raises(ValueError, match=message):
            decoder.forward(plan, hidden_of, AT_0, _core.CpuCaches(caches), out_of)
    both = np.zeros(cache.size + 1, np.float32)
    with pytest.raises(ValueError, match="the KV caches of the blocks overlap"):
        _core.CpuCaches([both[:-1].reshape(cache.shape), both[1:].reshape(cache.shape)])
    with pytest.raises(TypeError, match="a KV cache must be an array of float32"):
        _core.CpuCaches([cache.astype(np.float64)])
    caches = _core.CpuCaches([cache])
    with pytest.raises(TypeError, match="positions must be an array of int32"):
        decoder.forward(plan, hidden, np.zeros(1, np.int64), caches, out)
    with pytest.raises(ValueError, match="block 1 has no cache: there are those of 1 blocks"):
        decoder.attend(plan, 1, hidden, AT_0, caches)


def test_what_the_head_refuses(threads):
    head = _core.PackedLinear(threads, 5, 8, "f32")
    head.pack_rows(0, np.arange(40, dtype=np.float32).reshape(5, 8))
    other = _core.PackedLinear(threads, 5, 7, "f32")
    other.pack_rows(0, np.ones((5, 7), np.float32))
    with pytest.raises(ValueError, match="the head takes 7 features, but the stream has 8"):
        core_decoder(threads, head=other)
    with pytest.raises(ValueError, match="a head takes the normed stream, but there is no norm at the end"):
        core_decoder(threads, head=head, norm=None)
    plan, caches = plan_of_one_token().core, _core.CpuCaches([np.zeros((2, 4, 16, 1, 8), np.float32)])
    hidden, logits, ids = np.ones((1, 8), np.float32), np.zeros((1, 5), np.float32), np.full(1, -2, np.int32)
    without, _ = core_decoder(threads)
    with pytest.raises(ValueError, match="logits are asked for, but the decoder has no head"):
        without.forward_logits(plan, hidden, AT_0, caches, None, np.zeros((1, 0), np.float32))
    decoder, _ = core_decoder(threads, head=head)
    decoder.forward_logits(plan, hidden, AT_0, caches, AT_0, logits, ids)
    assert logits.argmax() == ids[0]
    for places, rows, of_ids, message in [
        (np.ones(1, np.int32), logits, ids, "the logits of token 1 are asked for, but the step has 1"),
        (-np.ones(1, np.int32), logits, ids, "the logits of token -1 are asked for"),
        (np.zeros(2, np.int32), np.zeros((2, 5), np.float32), None, "places has 2 numbers, but 1 are needed"),
        (None, np.zeros((2, 5), np.float32), None, r"logits has the shape \(2, 5\), but \(1, 5\) is needed"),
        (None, logits, np.zeros(2, np.int32), "ids has 2 numbers, but 1 are needed"),
        (None, logits, AT_0, "overlap, but some are written"),
    ]:
        with pytest.raises(ValueError, match=message):
            decoder.forward_logits(plan, hidden, AT_0, caches, places, rows, of_ids)
    with pytest.raises(RuntimeError, match="part of a decoder"):
        head.set_bias(None)


def test_what_heads_are_turned_by_must_fit(threads):
    plan = plan_of_one_token().core
    hidden, out = np.ones((2, 1, 8), np.float32)
    caches = _core.CpuCaches([np.zeros((2, 4, 16, 1, 8), np.float32)])
    two = np.ones(2, np.float32)
    decoder, _ = core_decoder(threads, rotary=0, turns=[(two, 1.0, [])])
    decoder.forward(plan, hidden, AT_0, caches, out)
    assert np.isfinite(out).all()
    with pytest.raises(ValueError, match="cos has 8 elements, but 4 are needed"):
        decoder.forward(plan, hidden, np.zeros(2, np.int32), caches, out)
    for turns, message in [
        ([], "heads are turned by cosines and sines number 0, but 0 are given"),
        ([(np.ones(5, np.float32), 1.0, [])], "have 10 features, but heads of 8 need an even number from 2 to 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            core_decoder(threads, rotary=0, turns=turns)[0].forward(plan, hidden, AT_0, caches, out)
    with pytest.raises(TypeError, match="the frequencies of heads must be an array of float32"):
        core_decoder(threads, turns=[(two.astype(np.float64), 1.0, [])])


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": YARN_ROPE}])
def test_the_core_turns_by_the_angles_of_the_modules(threads, rope):
    """Far positions, too: what a head is turned by is seen in the keys that are written."""
    rotary = RotaryEmbedding.from_config(SIZES | {"head_dim": 8} | rope, 8, 1 << 20)
    turns = [(rotary.inv_freq.numpy(), rotary.attention_scaling, [])]
    decoder, _ = core_decoder(threads, rotary=0, turns=turns)
    positions = np.array([0, 1, 77, 4095, 100_001, 1_048_575], np.int32)
    ids = [np.array(v, np.int32) for v in ([0, 6], [6], [[1]], range(16, 22))]
    plan = _core.CpuAttention(1).plan(16, *ids)
    hidden = np.tile(np.random.default_rng(0).normal(size=(1, 8)).astype(np.float32), (6, 1))
    cache = np.zeros((2, 4, 16, 1, 8), np.float32)
    decoder.forward(plan, hidden.copy(), positions, _core.CpuCaches([cache]), np.empty_like(hidden))
    keys = cache[0, 1, :6]  # [6, 1, 8]
    flat = torch.from_numpy(cache[1, 1, :6].copy())  # values: the same sums, not turned
    cos, sin = rotary.cos_sin(torch.from_numpy(positions), torch.float32)
    torch.testing.assert_close(torch.from_numpy(keys), apply_rotary(flat, cos, sin), atol=1e-5, rtol=1e-5)
    assert not np.allclose(keys[1:], flat[1:].numpy(), atol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_of_three_parts(threads, interleaved):
    """As the modules turn heads by them; equal parts turn as one part does, bit for bit."""
    rotary = RotaryEmbedding.from_config(SIZES | {"head_dim": 8}, 8, 1 << 20)
    rotary.axes = section_axes([2, 1, 1], 4, interleaved=interleaved)
    turns = [(rotary.inv_freq.numpy(), rotary.attention_scaling, rotary.axes.tolist())]
    count = 150  # of which the core computes the angles in three parts
    ids = [np.array(v, np.int32) for v in ([0, count], [count], [range(1, 11)], range(16, 16 + count))]
    plan = _core.CpuAttention(1).plan(16, *ids)
    random = np.random.default_rng(0)
    hidden = np.tile(random.normal(size=(1, 8)).astype(np.float32), (count, 1))
    three = random.integers(0, 5000, (3, count)).astype(np.int32)

    def keys_of(positions):
        decoder, _ = core_decoder(threads, rotary=0, turns=turns)
        cache = np.zeros((2, 12, 16, 1, 8), np.float32)
        decoder.forward(plan, hidden.copy(), positions, _core.CpuCaches([cache]), np.empty_like(hidden))
        return [part.reshape(-1, 1, 8)[16 : 16 + count] for part in cache]

    keys, flat = keys_of(three)
    cos, sin = rotary.cos_sin(torch.from_numpy(three), torch.float32)
    torch.testing.assert_close(
        torch.from_numpy(keys), apply_rotary(torch.from_numpy(flat.copy()), cos, sin), atol=1e-5, rtol=1e-5
    )
    assert not np.allclose(keys, keys_of(three[0])[0], atol=1e-2)
    assert np.array_equal(keys_of(three[0])[0], keys_of(np.tile(three[0], (3, 1)))[0])
    one = torch.from_numpy(three[0])
    thrice = rotary.cos_sin(one.expand(3, -1), torch.float32)
    assert all(map(torch.equal, thrice, rotary.cos_sin(one, torch.float32)))
    with pytest.raises(ValueError, match="cos has 1192 elements, but 1200 are needed"):
        keys_of(three[:, 1:].copy())
    with pytest.raises(ValueError, match="positions has 3 dimensions, but it must have 1"):
        keys_of(three[None])


def test_which_part_turns_a_pair():
    assert section_axes([2, 1, 3], 6, interleaved=False).tolist() == [0, 0, 1, 2, 2, 2]
    assert section_axes([24, 20, 20], 64, interleaved=True).tolist() == [0, 1, 2] * 20 + [0] * 4
    for wrong in (None, [1, 2], [2, 2, 2, 2], [9, -1, 0], [True, 3, 4], "abc", [3, 3, 3]):
        with pytest.raises(ModelLoadError, match="mrope_section must be 3 integers whose sum is 8"):
            section_axes(wrong, 8, interleaved=False)
