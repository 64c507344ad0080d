"""Models out of AWQ, GPTQ, compressed-tensors and FP8 folders against transformers with the numbers that they mean."""

import json

import numpy as np
import pytest
import torch
from checkpoints import LLAMA, assert_matches, make, prompts
from naive_schedule import NaiveEngine, Request
from quantized_models import AWQ, FAMILIES, GPTQ, SIZES, compressed, write
from safetensors.torch import load_file, save_file

from quantized_files import awq, gptq, meaning, packed, random_layer, whole, write_folder
from rustvllm import _core
from rustvllm.config import LoadConfig
from rustvllm.config.model_folder import read_model_config
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.cpu.norm import use_core_norms
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.cpu.packer import LinearPacker
from rustvllm.layers.linear import Linear
from rustvllm.model_loader import load_model
from rustvllm.worker.cpu_decoder import use_core_decoder


def load(folder, *, whole_layers=True, dtype=torch.float32, round_activations=False, quantization=None):
    """As a worker on the CPU does, or without its packer."""
    config = read_model_config(folder, model=str(folder))
    options = LinearOptions(round_activations=round_activations)
    if quantization is not None:
        options = LinearOptions("core", "int8", quantization)

    def packer(outline):
        return LinearPacker(_core.CpuThreads(1), options, outline, outline.tied_embedding, 0)

    maker = packer if whole_layers else None
    return load_model(config, LoadConfig(), dtype, torch.device("cpu"), 1 << 30, maker)


def check(reference, model):
    requests = [Request(prompt, 16) for prompt in prompts(97, [1, 2, 5, 9, 17, 30])]
    NaiveEngine(model, chunk=11).run(requests)
    assert len({token for r in requests for token in r.output}) >= 4, "it repeats itself"
    clear = sum(assert_matches(reference, r) for r in requests)
    assert clear > 0.9 * sum(len(r.output) for r in requests), "margins too small to say anything"


def kept(model, kind="int8"):
    """The layers that compute from whole numbers."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    kinds = (kind, {"int8": "int4", "w8a8": "w4a8"}[kind])
    return [
        linear for linear in linears if isinstance(linear.kernel, CoreLinear) and linear.kernel.packed.kind in kinds
    ]


def num_stored(model):
    """Dense layers, the head apart, which stays as it is."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    return len([linear for linear in linears if linear is not model.lm_head])


def change(folder, edit):
    """Write a folder's tensors again."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def changes_the_logits(model, folder, edit):
    """Whether the same folder with other numbers gives other logits, so that these numbers matter."""
    change(folder, edit)
    ours, theirs = (first_logits(each) for each in (model, load(folder)))
    return float((ours - theirs).abs().max())


def first_logits(model):
    request = Request(prompts(97, [9])[0], 1)
    NaiveEngine(model).run([request])
    return request.logits[0]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_awq_is_computed_from_its_own_whole_numbers(family, tmp_path):
    reference = write(tmp_path, family, AWQ, awq)
    model = load(tmp_path)
    assert len(kept(model)) == num_stored(model) > 0
    assert all(linear.weight.device.type == "meta" for linear in kept(model)), "a layer is there twice"
    check(reference, model)


@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_with_an_order_of_the_inputs(family, tmp_path):
    reference = write(tmp_path, family, GPTQ | {"desc_act": True}, gptq, acts=True)
    model = load(tmp_path)
    assert len(kept(model)) == num_stored(model) > 0
    check(reference, model)


@pytest.mark.parametrize("whole_layers", [True, False])
@pytest.mark.parametrize(
    ("config", "lay_out", "options"),
    [
        (GPTQ, gptq, {}),
        (GPTQ, lambda *a: gptq(*a, with_groups=False), {}),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda *a: gptq(*a, version=2), {}),
        (GPTQ | {"group_size": -1, "sym": True}, gptq, {"group_size": -1, "symmetric": True}),
        (GPTQ | {"group_size": 64}, gptq, {"group_size": 64}),
        (GPTQ | {"bits": 8, "sym": True}, lambda *a: gptq(*a, bits=8), {"bits": 8, "symmetric": True}),
        (AWQ | {"group_size": 64}, awq, {"group_size": 64}),
        (AWQ | {"group_size": 16}, awq, {"group_size": 16}),
        (AWQ | {"group_size": 8}, awq, {"group_size": 8}),
        (compressed("pack-quantized", bits=4, group_size=32), packed, {"symmetric": True}),
        (
            compressed("pack-quantized", bits=4, group_size=32, symmetric=False),
            lambda *a: packed(*a, symmetric=False), {},
        ),
        (
            compressed("pack-quantized", bits=4, group_size=32, actorder="group"),
            lambda *a: packed(*a, with_groups=True), {"symmetric": True, "acts": True},
        ),
        (compressed("pack-quantized", bits=4, group_size=-1), packed, {"symmetric": True, "group_size": -1}),
        (
            compressed("pack-quantized", bits=8, group_size=32),
            lambda *a: packed(*a, bits=8), {"bits": 8, "symmetric": True},
        ),
        (compressed("int-quantized", bits=8, group_size=-1), whole, {"bits": 8, "symmetric": True, "group_size": -1}),
        (compressed("int-quantized", bits=8, group_size=32), whole, {"bits": 8, "symmetric": True}),
        (
            compressed("naive-quantized", bits=4, group_size=32, symmetric=False),
            lambda *a: whole(*a, bits=4, symmetric=False), {},
        ),
    ],
    ids=[
        "gptq", "gptq-without-g_idx", "gptq-v2", "gptq-column-sym", "gptq-g64", "gptq-8-sym",
        "awq-g64", "awq-g16", "awq-g8", "packed-4", "packed-4-zeros", "packed-4-actorder", "packed-4-channel",
        "packed-8", "int8-channel", "int8-g32", "naive-4-zeros",
    ],
)  # fmt: skip
def test_every_form(config, lay_out, options, whole_layers, tmp_path):
    reference = write(tmp_path, "llama", config, lay_out, **options)
    model = load(tmp_path, whole_layers=whole_layers)
    is_whole = not (config is not GPTQ and options.get("bits") == 8 and not options.get("symmetric"))
    # 8 numbers with a sign and a zero point have 9 bits; those of "naive-4-zeros" do not, but could.
    is_whole = is_whole and config.get("format") != "naive-quantized"
    assert len(kept(model)) == (num_stored(model) if whole_layers and is_whole else 0)
    check(reference, model)


def test_zero_points_of_8_bits_make_dense_layers(tmp_path):
    config = GPTQ | {"bits": 8}
    reference = write(tmp_path, "llama", config, lambda *a: gptq(*a, bits=8), bits=8)
    model = load(tmp_path)
    assert not kept(model)
    check(reference, model)


@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_matter(version, tmp_path):
    config = GPTQ | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    write(tmp_path, "llama", config, lambda *a: gptq(*a, version=version))
    model = load(tmp_path)
    zero = 0x77777777 if version == 1 else 0x88888888 - (1 << 32)

    def forget(tensors):
        for name, tensor in tensors.items():
            if name.endswith("qzeros"):
                tensor.fill_(zero)

    assert changes_the_logits(model, tmp_path, forget) > 0.1
    # The two versions differ by one, which is seen, too.
    other, before = 3 - version, first_logits(load(tmp_path))
    configure(tmp_path, checkpoint_format="gptq" if other == 1 else "gptq_v2")
    assert float((first_logits(load(tmp_path)) - before).abs().max()) > 0.1


def test_the_order_of_the_inputs_matters(tmp_path):
    write(tmp_path, "llama", GPTQ | {"desc_act": True}, gptq, acts=True)
    model = load(tmp_path)

    def forget(tensors):
        for name in list(tensors):
            if name.endswith("g_idx"):
                del tensors[name]

    assert changes_the_logits(model, tmp_path, forget) > 0.1


def test_parts_of_one_layer_with_two_orders_are_dense(tmp_path):
    reference = write(tmp_path, "llama", GPTQ | {"desc_act": True}, gptq, acts=True)
    plain = load(tmp_path)
    assert len(kept(plain)) == num_stored(plain)
    reference = write(
        tmp_path,
        "llama",
        GPTQ | {"desc_act": True},
        lambda name, q, z, s, g: gptq(name, q, z, s, g) if "v_proj" not in name else _swapped(name, q, z, s, g),
        acts=True,
    )
    _use_swapped(reference, tmp_path)
    model = load(tmp_path)
    assert num_stored(model) - len(kept(model)) == reference.config.num_hidden_layers
    check(reference, model)


def _swapped(name, q, z, s, groups):
    """The layer with the numbers, and so the meaning, of two inputs exchanged that belong to different groups."""
    a, b = int(np.flatnonzero(groups == 0)[0]), int(np.flatnonzero(groups == 1)[0])
    q, groups = q.copy(), groups.copy()
    q[:, [a, b]], groups[[a, b]] = q[:, [b, a]], groups[[b, a]]
    return gptq(name, q, z, s, groups)


def _use_swapped(reference, folder):
    """Give the reference the meaning of what ``_swapped`` wrote."""
    tensors, state = load_file(folder / "model.safetensors"), reference.state_dict()
    for name, groups in tensors.items():
        if "v_proj.g_idx" not in name:
            continue
        old = tensors[name.replace("v_proj", "q_proj")]
        a, b = (int(index) for index in (old != groups).nonzero().view(-1))
        weight = state[name.replace("g_idx", "weight")]
        with torch.no_grad():
            weight[:, [a, b]] = weight[:, [b, a]]


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_0_that_the_model_does_not_have(value, tmp_path):
    biases = {f"model.layers.{layer}.mlp.up_proj.bias": torch.full((128,), value) for layer in range(3)}
    reference = write(tmp_path, "llama", GPTQ, gptq, extra=biases)
    if value:
        with pytest.raises(ModelLoadError, match=r"tensor 'model\.layers\.0\.mlp\.up_proj\.bias' is unexpected"):
            load(tmp_path)
    else:
        check(reference, load(tmp_path))


def test_a_model_by_transformers_code(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.StableLmConfig(**(LLAMA | SIZES))
    reference = transformers.StableLmForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    rng = np.random.default_rng(0)

    def make_layer(name, weight):
        parts = random_layer(rng, weight, 4, 32, symmetric=False)
        return gptq(name, *parts), meaning(*parts)

    write_folder(tmp_path, reference, GPTQ, make_layer)
    model = load(tmp_path)
    assert len(kept(model)) == 7 * config.num_hidden_layers
    check(reference, model)


def test_fused_parts_of_which_one_is_not_quantised_are_dense(tmp_path):
    reference = write(tmp_path, "llama", AWQ, awq, skip=lambda name: name.endswith("v_proj"))
    model = load(tmp_path)
    assert num_stored(model) - len(kept(model)) == reference.config.num_hidden_layers
    check(reference, model)


def test_a_quantised_head(tmp_path):
    reference = write(tmp_path, "llama", GPTQ | {"lm_head": True}, gptq)
    rng = np.random.default_rng(0)
    parts = random_layer(rng, reference.lm_head.weight.detach().numpy()[:96], 4, 32, symmetric=False)

    def edit(tensors):  # 97 outputs fill no words of zero points: 96 here
        del tensors["lm_head.weight"]
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:96].clone()
        tensors |= {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in gptq("lm_head", *parts).items()}

    change(tmp_path, edit)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        reference.lm_head.weight = torch.nn.Parameter(torch.from_numpy(meaning(*parts)))
        reference.model.embed_tokens.weight = torch.nn.Parameter(reference.model.embed_tokens.weight[:96])
    model = load(tmp_path)
    assert model.lm_head.kernel.packed.kind == "int4"
    request = Request(prompts(96, [9])[0], 8)
    NaiveEngine(model).run([request])
    assert_matches(reference, request)


@pytest.mark.parametrize("acts", [False, True])
def test_the_one_call_decoder_takes_them(acts, tmp_path):
    reference = write(tmp_path, "llama", GPTQ | {"desc_act": acts}, gptq, acts=acts, skip=lambda name: False)
    model = load(tmp_path)
    threads = _core.CpuThreads(1)
    model.lm_head.kernel = CoreLinear(threads, model.lm_head.weight, None)
    use_core_norms(model, threads)
    use_core_decoder(model)
    check(reference, model)
    assert all(ns > 0 for ns in model.decoder_kernel.times), "the modules ran"


def test_rounded_activations_stay_near(tmp_path):
    write(tmp_path, "llama", GPTQ | {"desc_act": True}, gptq, acts=True)
    model, rounded = load(tmp_path), load(tmp_path, round_activations=True)
    assert len(kept(rounded, "w8a8")) == num_stored(rounded)
    for exact, near in zip(kept(model), kept(rounded, "w8a8"), strict=True):
        assert torch.equal(exact.kernel.unpack(64), near.kernel.unpack(64))
        x = torch.randn((5, exact.weight.shape[1]), generator=torch.Generator().manual_seed(0))
        expected = exact(x)
        assert 0 < float((near(x) - expected).norm() / expected.norm()) < 0.02


def test_groups_that_rounded_activations_cannot_have_meet_them_as_they_are(tmp_path):
    reference = write(tmp_path, "llama", AWQ | {"group_size": 8}, awq, group_size=8)
    model = load(tmp_path, round_activations=True)
    assert len(kept(model)) == num_stored(model)
    check(reference, model)


def test_half_precision_keeps_the_whole_numbers(tmp_path):
    write(tmp_path, "llama", AWQ, awq)
    exact, half = load(tmp_path), load(tmp_path, dtype=torch.bfloat16)
    for one, other in zip(kept(exact), kept(half), strict=True):
        size = one.kernel.packed.out_features
        assert torch.equal(one.kernel.unpack(size), other.kernel.unpack(size))


def test_what_is_rounded_on_request_is_what_is_not_quantised(tmp_path):
    write(tmp_path, "llama", AWQ, awq)
    exact, rounded = load(tmp_path), load(tmp_path, quantization=32)
    assert rounded.lm_head.kernel.packed.kind == "int8"
    one, other = (model.layers[0].mlp.down_proj.kernel for model in (exact, rounded))
    assert torch.equal(one.unpack(64), other.unpack(64))


@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8_is_read_as_what_the_model_computes_in(method, scales, tmp_path):
    how = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if method == "compressed-tensors":
        how = compressed("float-quantized", bits=8, group_size=-1, kind="float")
    if scales == "block" and method == "fp8":
        how |= {"weight_block_size": [48, 40]}
    elif scales == "block":
        weights = how["config_groups"]["group_0"]["weights"]
        weights |= {"strategy": "block", "block_structure": [48, 40]}

    def make_layer(name, weight):
        out_features, in_features = weight.shape
        shape = {"tensor": (1, 1), "channel": (out_features, 1), "block": (48, 40)}[scales]
        down, across = shape if scales == "block" else (-(-out_features // shape[0]), in_features)
        grid = (-(-out_features // down), -(-in_features // across))
        rng = np.random.default_rng(0)
        scale = (0.01 * rng.uniform(0.5, 2, grid)).astype(np.float32)
        whole = np.repeat(np.repeat(scale, down, 0), across, 1)[:out_features, :in_features]
        numbers = torch.from_numpy(weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        value = numbers.float().numpy() * whole
        stored = {"tensor": scale.reshape(-1)[:1], "channel": scale, "block": scale}[scales]
        kind = "weight_scale_inv" if method == "fp8" and scales == "block" else "weight_scale"
        return {f"{name}.weight": numbers, f"{name}.{kind}": stored, f"{name}.input_scale": np.float32([3])}, value

    reference = write_folder(tmp_path, make("llama", FAMILIES["llama"]), how, make_layer)
    model = load(tmp_path)
    assert not kept(model)
    check(reference, model)


@pytest.mark.parametrize(("number", "scale", "shown"), [(float("nan"), 1, "nan"), (448, 3e38, "inf")])
def test_fp8_that_is_not_finite_is_refused(number, scale, shown, tmp_path):
    def make_layer(name, weight):
        numbers = torch.from_numpy(weight).to(torch.float8_e4m3fn)
        return {f"{name}.weight": numbers, f"{name}.weight_scale": np.float32([1])}, numbers.float().numpy()

    write_folder(tmp_path, make("llama", FAMILIES["llama"]), {"quant_method": "fp8"}, make_layer)
    name = "model.layers.1.mlp.up_proj.weight"

    def edit(tensors):
        tensors[name].view(torch.uint8)[5, 7] = torch.tensor(number).to(torch.float8_e4m3fn).view(torch.uint8)
        tensors[f"{name}_scale"][0] = scale

    change(tmp_path, edit)
    with pytest.raises(ModelLoadError, match=rf"the weight '{name}' with its scale is {shown} at row 5, column 7"):
        load(tmp_path)


def test_memory_is_that_of_the_whole_numbers(tmp_path):
    """A limit between what packed and dense layers take lets the packed ones in."""
    write(tmp_path, "llama", AWQ, awq)
    config = read_model_config(tmp_path, model=str(tmp_path))

    def packer(outline):
        return LinearPacker(_core.CpuThreads(1), LinearOptions(), outline, outline.tied_embedding, 0)

    def size(make_packer, available):
        load_model(config, LoadConfig(), torch.float32, torch.device("cpu"), available, make_packer)

    model = load(tmp_path)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    whole = sum(linear.kernel.nbytes for linear in kept(model))
    replaced = sum(linear.weight.nbytes for linear in kept(model))
    assert whole < 0.4 * replaced
    available = dense - replaced + whole + (replaced - whole) // 8
    size(packer, available)
    with pytest.raises(ModelLoadError, match="needs"):
        size(None, available)
