"""What is special about gpt-oss: sinks, clamped gates and biases matter, and how folders have its experts."""

import json

import pytest
import torch
from checkpoints import VARIANTS, assert_diverse, assert_matches, load, make, oracle_logits, prompts
from naive_schedule import NaiveEngine, Request
from safetensors.torch import load_file, save_file
from test_experts import load_packed
from test_tensor_parallel import assert_equal

from mxfp4_files import write_mxfp4
from rank_world import RankWorld, job_of, run_job
from rustvllm import LLM, SamplingParams
from rustvllm.config.checkpoint.forms import kept_layers, read_forms
from rustvllm.config.checkpoint.quantized_folders import read_quantization
from rustvllm.config.model_folder import read_model_config
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.linear import Linear

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3}
"""Inputs of whole blocks."""
STACKS = ("gate_up_proj", "down_proj")


def run(model, lengths=(1, 2, 5, 9, 17, 30), **options):
    requests = [Request(prompt, 16) for prompt in prompts(97, lengths)]
    for index, request in enumerate(requests):
        request.arrives = index  # prompts come in while others decode
    requests[3].preempt_at = (5,)
    with torch.inference_mode():
        NaiveEngine(model, budget=16, chunk=7, **options).run(requests)
    return requests


def check(reference, requests):
    clear = sum(assert_matches(reference, request) for request in requests)
    assert clear > 0.9 * sum(len(request.output) for request in requests), "margins too small to say anything"


def change(folder, edit):
    """Write a folder's tensors again."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def experts_of(model):
    layers = [layer.mlp.experts for layer in model.layers]
    return [module for experts in layers for module in experts.modules() if isinstance(module, Linear)]


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """A folder, and transformers' model of what its codes mean."""
    folder = tmp_path_factory.mktemp("mxfp4")
    return folder, write_mxfp4(folder, make("gpt-oss", WIDE))


@torch.no_grad()
@pytest.mark.parametrize(
    "part",
    ["sinks", "q_proj.bias", "o_proj.bias", "router.bias", "gate_up_proj_bias", "down_proj_bias", "limit", "alpha"],
)
def test_every_part_matters(part):
    """Without it, transformers itself chooses other tokens: a model that left it out would fail its tests."""
    reference, other = make(*VARIANTS["gpt-oss"]), make(*VARIANTS["gpt-oss"])
    for name, parameter in other.named_parameters():
        if name.endswith(part):
            parameter.fill_(-1e9 if part == "sinks" else 0.0)
    for layer in other.model.layers:
        if part in ("limit", "alpha"):
            setattr(layer.mlp.experts, part, {"limit": 1e9, "alpha": 1.0}[part])
    differing = count = 0
    for prompt in prompts(97, [9, 17, 30, 41]):
        expected, found = (oracle_logits(model, prompt, 1).argmax(-1) for model in (reference, other))
        differing, count = differing + int((expected != found).sum()), count + len(expected)
    assert differing > 0.03 * count


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_stacks_in_16_bits_keep_their_numbers(stored, tmp_path):
    reference = make(*VARIANTS["gpt-oss"])
    reference.to(stored).save_pretrained(tmp_path)
    # What was turned to 16 bits has rotary frequencies of 16 bits.
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model = load_packed(tmp_path, LinearOptions("core"))
    assert {layer.kernel.packed.kind for layer in experts_of(model)} == {"bf16" if stored == torch.bfloat16 else "f16"}
    requests = run(model)
    assert all(ns > 0 for ns in model.decoder_kernel.times), "the modules ran"
    check(reference, requests)


@pytest.mark.parametrize(("kind", "group_size"), [("int8", None), ("int8", 32), ("int4", 32)])
def test_stacks_are_rounded_as_other_experts_are(kind, group_size, tmp_path):
    reference = make("gpt-oss", WIDE)
    reference.save_pretrained(tmp_path)
    model = load_packed(tmp_path, LinearOptions("core", kind, group_size))
    assert {layer.kernel.packed.kind for layer in experts_of(model)} == {kind}
    assert {layer.mlp.gate.kernel.packed.kind for layer in model.layers} == {"f32"}
    state = reference.state_dict()
    with torch.no_grad():
        for name, parameter in state.items():
            if "proj" not in name or "bias" in name:
                continue
            module = name.removeprefix("model.").removesuffix(".weight")
            part = module.rpartition(".")[2]
            for number, matrix in enumerate(parameter if parameter.dim() == 3 else [parameter]):
                matrix.copy_(rounded(model, module, part, number))
        state["lm_head.weight"].copy_(model.lm_head.weight_rows(97))
    check(reference, run(model))


def rounded(model, module, part, number):
    """The numbers that the core has of a map, as transformers' model has them."""
    layer = model.layers[int(module.split(".")[1])]
    if part == "o_proj":
        return layer.self_attn.o_proj.weight_rows(64)
    if part in ("q_proj", "k_proj", "v_proj"):
        sizes = layer.self_attn.sizes
        widths = [heads * sizes.head_dim for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)]
        return layer.self_attn.qkv_proj.weight_rows(sum(widths)).split(widths)["qkv".index(part[0])]
    expert = layer.mlp.experts[number]
    if part == "down_proj":
        return expert.down_proj.weight_rows(64).t()
    gate, up = expert.gate_up_proj.weight_rows(192).chunk(2)
    return torch.stack((gate, up), 1).flatten(0, 1).t()


@pytest.mark.parametrize("cache_dtype", [None, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rounds", [False, True])
def test_codes_of_mxfp4_are_kept_and_mean_what_transformers_says(rounds, cache_dtype, mxfp4):
    folder, reference = mxfp4
    model = load_packed(folder, LinearOptions("core", round_activations=rounds))
    kinds = {layer.kernel.packed.kind for layer in experts_of(model)}
    assert kinds == {"w4a8" if rounds else "int4"}
    sizes = {(layer.kernel.packed.in_features, layer.kernel.packed.out_features) for layer in experts_of(model)}
    assert sizes == {(64, 192), (96, 64)}
    requests = run(model, cache_dtype=cache_dtype)
    assert all(ns > 0 for ns in model.decoder_kernel.times), "the modules ran"
    if rounds or cache_dtype is not None:
        wanted = [oracle_logits(reference, request.tokens, len(request.prompt))[0] for request in requests]
        found = [request.logits[0] for request in requests]
        assert all(torch.corrcoef(torch.stack(pair))[0, 1] > 0.98 for pair in zip(wanted, found, strict=True))
    else:
        check(reference, requests)
        assert_diverse([request.output for request in requests])


def test_mxfp4_equals_transformers_own_reading(mxfp4):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, reference = mxfp4
    weights = load_file(folder / "model.safetensors")
    model = load(folder)  # without packed layers
    for number, layer in enumerate(model.layers):
        for module in STACKS:
            name = f"model.layers.{number}.mlp.experts.{module}"
            theirs = convert_moe_packed_tensors(
                weights[f"{name}_blocks"], weights[f"{name}_scales"], dtype=torch.float32
            )
            assert torch.equal(theirs, reference.state_dict()[name])
            for expert, whole in zip(layer.mlp.experts, theirs, strict=True):
                own = getattr(expert, module).weight
                expected = whole.t() if module == "down_proj" else torch.cat((whole.t()[::2], whole.t()[1::2]))
                assert torch.equal(own, expected)


def test_all_exponents_mean_their_powers_of_two(mxfp4, tmp_path):
    folder, _ = mxfp4
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    scales = tensors[f"{name}_scales"]
    scales.view(-1)[:253] = torch.arange(253, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    model, packed = load(tmp_path), load_packed(tmp_path, LinearOptions())
    low = tensors[f"{name}_blocks"].int() & 15
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((values, -values))
    expected = values[low] * torch.exp2(scales.double() - 127)[..., None]  # of every second input
    for number in range(6):
        ours = model.layers[0].mlp.experts[number].down_proj.weight
        assert torch.equal(ours[:, ::2].double(), expected[number].flatten(1))
        assert torch.equal(packed.layers[0].mlp.experts[number].down_proj.weight_rows(64), ours)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t, name: t[f"{name}_scales"].view(-1)[77:78].fill_(255),
            r"down_proj.weight_scales' has the exponent 255, but must have at most 252 \(255 stands for NaN",
        ),
        (lambda t, name: t[f"{name}_scales"][3, 5].fill_(253), r"experts.3.down_proj.* has the exponent 253"),
        (lambda t, name: t.update({f"{name}_blocks": t[f"{name}_blocks"][..., :8]}), r"U8 \[outputs, groups, 16\]"),
        (lambda t, name: t.update({f"{name}_blocks": t[f"{name}_blocks"].int()}), "is I32 .*, expected U8"),
        (lambda t, name: t.update({f"{name}_blocks": t[f"{name}_blocks"][0]}), "must have 4 dimensions"),
        (lambda t, name: t.update({f"{name}_scales": t[f"{name}_scales"][..., :2]}), r"expected \[64, 3\]"),
        (lambda t, name: t.update({f"{name}_scales": t[f"{name}_scales"].float()}), "has dtype F32, not U8"),
        (lambda t, name: t.pop(f"{name}_scales"), "it has weight_blocks, but no weight_scales"),
        (lambda t, name: t.update({f"{name}_blocks": t[f"{name}_blocks"][:, :32]}), r"expected \[32, 3\]"),
        (lambda t, name: t.update({f"{name}_bias": t[f"{name}_bias"][:, :32]}), r"has shape \[32\], expected \[64\]"),
        (lambda t, name: t.update({f"{name}_bias": t[f"{name}_bias"][0]}), "must have 2 dimensions"),
        (
            lambda t, name: [t.update({f"{name}_{k}": t[f"{name}_{k}"][:5]}) for k in ("blocks", "scales", "bias")],
            r"experts.5.down_proj.weight' is missing",
        ),
        (
            lambda t, name: t["model.layers.1.self_attn.sinks"].view(-1)[1:2].fill_(float("nan")),
            r"model.layers.1.self_attn.sinks has a number that is not finite",
        ),
        (
            lambda t, _: t.update({"model.layers.1.self_attn.sinks": torch.zeros(3)}),
            r"sinks' has shape \[3\], expected",
        ),
        (lambda t, _: t.pop("model.layers.1.self_attn.sinks"), r"layers.1.self_attn.sinks' is missing"),
    ],
)
def test_damaged_folders_are_refused_by_tensor(edit, message, mxfp4, tmp_path):
    folder, _ = mxfp4
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors, "model.layers.1.mlp.experts.down_proj")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": None}, r"are parts of quantised weights, but config.json has no quantization_config"),
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
            "is MXFP4 of 4 bits, groups of 32, which rustvllm reads for GptOssForCausalLM .*, not for MixtralFor",
        ),
    ],
)
def test_mxfp4_of_another_kind_is_refused_by_name(changes, message, mxfp4, tmp_path):
    folder, _ = mxfp4
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)
    if changes.get("quantization_config", 0) is None:
        with pytest.raises(ModelLoadError, match=message):
            read_forms(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, name: t.update({name: t[name][0]}), r"must have 3 dimensions \(experts, inputs, outputs\)"),
        (
            lambda t, name: t.update({name: t[name][..., :-1]}),
            "has 47 outputs for gates and features, which must be even",
        ),
        (
            lambda t, name: t.update({name: t[name][:, :-1]}),
            r"gate_proj.weight' has shape \[24, 31\], expected \[24, 32\]",
        ),
        (lambda t, name: t.update({name: t[name][:0]}), r"has the shape \[0, 32, 48\], but must have"),
    ],
)
def test_stacks_of_other_shapes_are_refused(edit, message, tmp_path):
    make(*VARIANTS["gpt-oss"]).save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: edit(tensors, "model.layers.0.mlp.experts.gate_up_proj"))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with RankWorld(2, tmp_path_factory.mktemp("two")) as world:
        yield world


def test_ranks_read_their_parts_of_stacks(two, tmp_path):
    make("gpt-oss", WIDE).save_pretrained(tmp_path)
    job = job_of(tmp_path)
    expected, alone = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    assert all(rank["read"] < 0.7 * alone["read"] for rank in ranks)


@pytest.fixture(scope="module")
def shareable(tmp_path_factory):
    """A folder whose experts two ranks can share: half of their width is whole blocks."""
    folder = tmp_path_factory.mktemp("shareable")
    write_mxfp4(folder, make("gpt-oss", WIDE | {"intermediate_size": 192}))
    return folder


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_ranks_read_their_parts_of_mxfp4(activations, two, shareable):
    job = job_of(shareable, RUSTVLLM_LINEAR_KERNEL="core", RUSTVLLM_ACTIVATIONS=activations)
    expected, alone = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    assert all(rank["read"] < 0.7 * alone["read"] for rank in ranks)
    assert all(rank["products"] < 0.6 * alone["products"] for rank in ranks)
    assert all(rank["collectives"] > 0 for rank in ranks)


def test_ranks_cannot_cut_blocks_of_mxfp4(mxfp4, two):
    with pytest.raises(Exception, match=r"down_proj.* is stored in MXFP4 blocks of 32 inputs, .* would cut apart"):
        two.run(job_of(mxfp4[0]))


def test_a_head_in_mxfp4_is_not_shared(shareable, two, tmp_path):
    """Ranks have rows of it that are not stored."""
    tensors = load_file(shareable / "model.safetensors")
    for stack in list(tensors):
        if stack.endswith(("down_proj_blocks", "down_proj_scales")) and ".layers.0." in stack:
            kind = "weight_" + stack.rpartition("_")[2]
            tensors[f"lm_head.{kind}"] = tensors[stack].flatten(0, 1)[:97, :2]
    del tensors["lm_head.weight"]
    (tmp_path / "config.json").write_text((shareable / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    run_job(job_of(tmp_path))
    with pytest.raises(Exception, match=r"lm_head.weight' is quantised \(MXFP4\), and ranks cannot share such"):
        two.run(job_of(tmp_path))


def test_a_draft_model_changes_no_token(mxfp4):
    folder, _ = mxfp4
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 64, "max_model_len": 96}
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    wanted = [{"prompt_token_ids": prompt} for prompt in prompts(97, [3, 30])]
    outputs = []
    for speculative in (None, {"model": str(folder), "num_speculative_tokens": 3}):
        with LLM(str(folder), speculative_config=speculative, **options) as llm:
            outputs.append([out.outputs[0].token_ids for out in llm.generate(wanted, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]


def test_what_a_folder_takes_is_known_from_its_headers(mxfp4):
    folder, reference = mxfp4
    config = read_model_config(folder, model=str(folder)).hf_config
    forms = read_forms(folder, read_quantization(config, folder))
    stacks = [form for form in forms if form.kind == "MXFP4"]
    state = reference.state_dict()
    assert len(stacks) == 6
    assert sum(form.num_parameters for form in stacks) == sum(
        state[name].numel() for name in state if name.endswith(STACKS)
    )
    kept = kept_layers(forms, 4, chosen_share=0.5)
    assert [layer.chosen_share for layer in kept].count(0.5) == 6
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"


def test_company_and_pieces_change_no_bit_of_mxfp4(mxfp4):
    folder, _ = mxfp4
    model = load_packed(folder, LinearOptions("core", round_activations=True, matrix_unit=False))
    together = run(model)
    for chunk, request in zip((3, 64, 5, 2, 9, 11), together, strict=True):
        alone = Request(request.prompt, 16)
        with torch.inference_mode():
            NaiveEngine(model, chunk=chunk).run([alone])
        assert torch.equal(torch.stack(alone.logits), torch.stack(request.logits))


def test_the_folder_and_the_file_of_the_benchmarks_are_one_model(tmp_path):
    """As ``write_gpt_oss_0_6b`` and ``mxfp4_gguf.py`` make them, only smaller."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    import mxfp4_gguf
    from tiny_checkpoint import write_gpt_oss

    tokens = {"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    shape = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 6, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 128,
    }  # fmt: skip
    write_gpt_oss(tmp_path, shape)
    logits = [run_job(job_of(tmp_path))[0]]
    for form in ("mxfp4", "f32"):
        path = tmp_path / f"m-{form}.gguf"
        mxfp4_gguf.write(tmp_path, path, form)
        logits.append(run_job(job_of(path))[0])
    assert logits[0].std() > 0.1
    assert all((other - logits[0]).abs().max() < 1e-4 for other in logits[1:])
