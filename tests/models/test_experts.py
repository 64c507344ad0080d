"""What is special about experts: who is chosen, what is rounded, what files call them, and what is refused."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from checkpoints import VARIANTS, load, make, prompts
from naive_schedule import NaiveEngine, Request
from safetensors.torch import load_file, save_file

from rustvllm import LLM, SamplingParams, _core
from rustvllm.config import LoadConfig
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu.linear import CoreLinear, TorchLinear
from rustvllm.layers.cpu.norm import use_core_norms
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.cpu.packer import LinearPacker
from rustvllm.layers.linear import Linear
from rustvllm.layers.router import Router, Routing
from rustvllm.lora.request import LoRARequest
from rustvllm.model_loader import load_model
from rustvllm.models.decoder.expert_mlp import ExpertMLP, ExpertSizes, SharedExpert
from rustvllm.worker.cpu_decoder import use_core_decoder


def load_packed(folder, options, dtype=torch.float32):
    """As a worker on the CPU does, all blocks in one call where that can be."""
    hf_config = json.loads((folder / "config.json").read_text())
    config = SimpleNamespace(
        model=str(folder), path=folder, hf_config=hf_config, architecture=hf_config["architectures"][0],
        max_model_len=128, seed=0, model_impl="rustvllm", pooler=None,
    )  # fmt: skip
    threads = _core.CpuThreads(2)

    def packer(outline):
        return LinearPacker(threads, options, outline, outline.tied_embedding, 0)

    model = load_model(config, LoadConfig(), dtype, torch.device("cpu"), 1 << 30, packer)
    use_core_norms(model, threads)
    use_core_decoder(model)
    return model


def test_the_largest_logits_choose_and_the_first_of_equal_ones():
    router = Router(4, 6, 3, Routing(is_normed=False))
    logits = torch.tensor([[0.0, 3, 1, 2, -1, 0.5], [1, 1, 1, 1, 1, 1], [0, 2, 1, 1, 1, 2]])
    weights, ids = router.choose(logits)
    assert ids.tolist() == [[1, 3, 2], [0, 1, 2], [1, 5, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, ids), atol=1e-6, rtol=0)
    router.routing = Routing(is_normed=True)
    normed, _ = router.choose(logits.to(torch.bfloat16))
    assert normed.dtype == torch.float32
    torch.testing.assert_close(normed, weights / weights.sum(-1, keepdim=True), atol=1e-6, rtol=0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_groups", "num_chosen_groups"), [(1, 1), (4, 1), (4, 2), (3, 2)])
def test_a_routing_chooses_and_weighs_as_its_words_say(scores, has_bias, num_groups, num_chosen_groups):
    torch.manual_seed(num_groups)
    num_experts, num_chosen, scale = 12, 3, 2.5
    routing = Routing(
        is_normed=True, scores=scores, has_choice_bias=has_bias, num_groups=num_groups,
        num_chosen_groups=num_chosen_groups, scale=scale,
    )  # fmt: skip
    router = Router(4, num_experts, num_chosen, routing)
    bias = torch.randn(num_experts) * (0.5 if has_bias else 0.0)
    if has_bias:
        router.e_score_correction_bias.copy_(bias)
    logits = torch.randn(50, num_experts)
    weights, ids = router.choose(logits)
    moved = 0
    for row, own_weights, own_ids in zip(logits, weights, ids, strict=True):
        own_scores = row.softmax(0) if scores == "softmax" else row.sigmoid()
        keys = (own_scores + bias).tolist()
        size = num_experts // num_groups
        groups = [keys[i : i + size] for i in range(0, num_experts, size)]
        best = sorted(range(num_groups), key=lambda i: -sum(sorted(groups[i])[-2:]))[:num_chosen_groups]
        allowed = [i for i in range(num_experts) if i // size in best]
        expected = sorted(allowed, key=lambda i: -keys[i])[:num_chosen]
        assert own_ids.tolist() == expected
        chosen = own_scores[expected]
        torch.testing.assert_close(own_weights, scale * chosen / chosen.sum(), atol=1e-6, rtol=1e-5)
        moved += set(expected) != set(row.topk(num_chosen).indices.tolist())
    assert (moved > 5) == (has_bias or num_groups > 1), f"{moved} choices are not those of the largest logits"


def test_small_differences_of_wide_logits_choose_in_a_narrow_model():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    router = Router(2, 2, 1, Routing(is_normed=True, scores="sigmoid", has_choice_bias=True, is_wide=True))
    torch.set_default_dtype(before)
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32
    router.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2.0**-9]]))
    router.e_score_correction_bias.zero_()
    hidden = torch.ones((1, 2), dtype=torch.bfloat16)
    assert router(hidden).unique().numel() == 1, "the logits differ in 16 bits, too"
    for kernel in (None, TorchLinear(router.weight, None), CoreLinear(_core.CpuThreads(1), router.weight, None)):
        router.kernel = kernel
        logits = router.logits(hidden)
        assert logits.tolist() == [[1.0, 1.0 + 2.0**-9]]
        assert router.choose(logits)[1].tolist() == [[1]]
    router.e_score_correction_bias.copy_(torch.tensor([0.1, 0.0]))
    weights, ids = router.choose(logits)
    assert (weights.tolist(), ids.tolist()) == ([[1.0]], [[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [None, SharedExpert("shared_expert", 12, has_gate=True)])
def test_other_tokens_of_a_step_change_no_bit(dtype, shared):
    """Products of one row each are compared, because torch sums those of several rows in another order."""
    torch.manual_seed(0)
    mlp = ExpertMLP(ExpertSizes(16, 8, 5, 3), "silu", Routing(is_normed=True), shared=shared).to(dtype)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    for module in mlp.modules():
        if isinstance(module, Linear):
            module.kernel = OneRowAtATime(module)
    hidden, residual = torch.randn(2, 40, 16, dtype=dtype)
    together = mlp(hidden, residual=residual.clone())
    alone = [mlp(hidden[i : i + 1], residual=residual[i : i + 1].clone()) for i in range(40)]
    assert torch.equal(together, torch.cat(alone))


class OneRowAtATime:
    nbytes = 0

    def __init__(self, linear):
        self.linear = linear

    def forward(self, x, activation, residual):
        assert activation is None
        assert residual is None
        return torch.cat([row[None] @ self.linear.weight.t() for row in x])


@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral", "qwen2-moe"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_experts_are_rounded_and_the_router_keeps_its_numbers(variant, stored, tmp_path):
    make(*VARIANTS[variant]).to(stored).save_pretrained(tmp_path)
    model = load_packed(tmp_path, LinearOptions("core", "int8", 32, round_activations=True))
    assert model.decoder_kernel is not None
    weights = load_file(tmp_path / "model.safetensors")
    block = "block_sparse_moe" if variant == "mixtral" else "mlp"
    for number, layer in enumerate(model.layers):
        router = layer.mlp.gate
        assert router.kernel.packed.kind == ("f32" if stored == torch.float32 else "bf16")
        expected = weights[f"model.layers.{number}.{block}.gate.weight"].float()
        assert torch.equal(router.weight_rows(router.weight.shape[0]), expected)
        experts = [m for m in layer.mlp.experts.modules() if isinstance(m, Linear)]
        assert {expert.kernel.packed.kind for expert in experts} == {"w8a8"}
    requests = [Request(prompt, 8) for prompt in prompts(97, [3, 17])]
    with torch.inference_mode():
        NaiveEngine(model, chunk=11).run(requests)
    assert all(ns > 0 for ns in model.decoder_kernel.times), "the modules ran"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_core_computes_experts_however_small_they_are(stored, tmp_path):
    """A call for each would take longer than torch's product, but it computes the experts of a step in one."""
    make(*VARIANTS["qwen3-moe-some-layers"]).to(stored).save_pretrained(tmp_path)
    model = load_packed(tmp_path, LinearOptions())
    for layer in model.layers:
        mlp = layer.mlp
        if isinstance(mlp, ExpertMLP):
            kinds = {module.kernel.packed.kind for module in mlp.modules() if isinstance(module, Linear)}
            assert kinds == {"f32" if stored == torch.float32 else "bf16"}
        else:
            assert isinstance(mlp.down_proj.kernel, TorchLinear)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """GLM-4.5's folders have one behind the others; one that the configuration does not name is refused."""
    reference = make("glm4-moe", {"num_nextn_predict_layers": 1})
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    last = {name: tensor for name, tensor in weights.items() if ".layers.2." in name}
    weights |= {name.replace(".layers.2.", ".layers.3."): tensor.clone() for name, tensor in last.items()}
    save_file(weights | {"model.layers.3.eh_proj.weight": torch.zeros(32, 64)}, file)
    load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match=r"model\.layers\.3\..*' is une"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("qwen2-moe", "layers.1.mlp.shared_expert_gate.weight"),
        ("qwen2-moe", "layers.0.mlp.shared_expert.up_proj.weight"),
        ("glm4-moe", "layers.2.mlp.gate.e_score_correction_bias"),
        ("dots1", "layers.1.mlp.experts.5.down_proj.weight"),
    ],
)
def test_a_part_that_is_missing_or_of_another_shape_is_named(variant, name, tmp_path):
    make(*VARIANTS[variant]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    tensor = weights.pop(f"model.{name}")
    save_file(weights, file)
    with pytest.raises(ModelLoadError, match=re.escape(name) + "' is missing"):
        load(tmp_path)
    save_file(weights | {f"model.{name}": torch.cat((tensor, tensor))}, file)
    with pytest.raises(ModelLoadError, match=re.escape(name)):
        load(tmp_path)


def test_stacked_names_are_not_read(tmp_path):
    """transformers stacks experts in memory alone; a folder that has them stacked is refused with both names."""
    make(*VARIANTS["qwen3-moe"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    stacked = torch.stack([weights.pop(name.format(number)) for number in range(6)])
    save_file(weights | {"model.layers.0.mlp.experts.down_proj": stacked}, file)
    with pytest.raises(ModelLoadError, match=r"experts\.0\.down_proj\.weight' is missing.*experts\.down_proj' is une"):
        load(tmp_path)


def test_adapters_of_experts_are_refused_and_can_be_merged(tmp_path):
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    make(*VARIANTS["qwen3-moe"]).save_pretrained(folder)
    adapter.mkdir()
    module = "base_model.model.model.layers.1.mlp.experts.3.up_proj"
    torch.manual_seed(0)
    save_file(
        {f"{module}.lora_A.weight": torch.randn(4, 32), f"{module}.lora_B.weight": torch.randn(24, 4)},
        adapter / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["up_proj"], "task_type": "CAUSAL_LM"}
    settings["layers_to_transform"] = [1]
    settings["target_modules"] = r".*layers\.1\.mlp\.experts\.3\.up_proj"
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 32, "max_model_len": 64}
    params = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
    prompt = {"prompt_token_ids": prompts(97, [9])[0]}
    with LLM(str(folder), enable_lora=True, **options) as llm:
        plain = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(Exception, match=r"experts\.3\.up_proj belongs to experts, which compute only some tokens"):
            llm.generate(prompt, params, use_tqdm=False, lora_request=LoRARequest("a", 1, str(adapter)))
    with LLM(str(folder), merge_lora=[str(adapter)], **options) as llm:
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids != plain


@pytest.mark.parametrize("variant", ["qwen3-moe-some-layers", "mixtral", "gpt-oss", "qwen2-moe", "glm4-moe", "dots1"])
def test_adapters_of_attention_have_pefts_logits(variant, tmp_path):
    """And of the MLP that computes every token of Qwen2-MoE; of GLM and dots peft takes its names for experts."""
    pytest.importorskip("peft", reason="peft is not installed")
    from peft_adapters import make_adapter, with_adapter
    from test_lora import ALL_LOGITS, OPTIONS, assert_equals_peft, ids_of, run, share_that_differs

    reference = make(*VARIANTS[variant])
    reference.save_pretrained(tmp_path / "model")
    modules = ["q_proj", "v_proj", "o_proj"]
    if reference.config.model_type == "qwen2_moe":
        modules = r".*(q_proj|v_proj|o_proj|shared_expert\.(gate|up|down)_proj)"
    make_adapter(reference, tmp_path / "adapter", seed=1, target_modules=modules)
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        samples, alone = run(llm, LoRARequest("a", 1, str(tmp_path / "adapter")), ALL_LOGITS), run(llm)
    assert share_that_differs(ids_of(samples), ids_of(alone)) >= 0.9, "the adapter changes too little to be seen"
    with with_adapter(reference, tmp_path / "adapter") as adapted:
        assert_equals_peft(adapted, samples)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_a_weight_that_is_no_number_is_named(kind, tmp_path):
    make(kind, {}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors, reverse=True) if name.endswith("down_proj.weight"))
    tensors[name][3, 2] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=f"{name.removeprefix('model.')} of the model: a weight .*: row 3 "
    ) as caught:
        LLM(str(tmp_path), skip_tokenizer_init=True, quantization="int8", max_model_len=64, num_gpu_blocks_override=20)
    assert str(tmp_path) in str(caught.value)
