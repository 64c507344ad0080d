"""Models out of GGUF files against transformers with the numbers that the files' blocks have."""

import pytest
import torch
from checkpoints import (
    DOTS1,
    FULL,
    GEMMA,
    GEMMA3,
    GLM4_MOE,
    GPT2,
    GPT_OSS,
    GRANITE,
    LLAMA,
    LLAMA3_ROPE,
    MIXTRAL,
    OLMO3,
    QWEN2_MOE,
    QWEN3_MOE,
    SLIDING,
    SMOLLM3,
    YARN_ROPE,
    assert_matches,
    make,
    prompts,
)
from naive_schedule import NaiveEngine, Request

from rustvllm import _core
from rustvllm.config import LoadConfig
from rustvllm.config.checkpoint.forms import kept_layers, read_forms
from rustvllm.config.checkpoint.gguf_file import GgufFile
from rustvllm.config.model_folder import read_model_config
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.cpu.embedding import BlockEmbedding, PackedEmbedding
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.cpu.packer import LinearPacker
from rustvllm.layers.linear import Linear
from rustvllm.model_loader import load_model
from rustvllm.model_loader.gguf_tensors import file_name, read_gguf_headers

gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)

SIZES = {"hidden_size": 64, "intermediate_size": 96}
EXPERT_SIZES = {"moe_intermediate_size": 32, "head_dim": 16}
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
VARIANTS = {
    # name -> kind of checkpoint, what its configuration has besides
    "gpt2": ("gpt2", GPT2 | {"n_embd": 64}),
    "gpt2-untied": ("gpt2", GPT2 | {"n_embd": 64, "tie_word_embeddings": False, "n_inner": 96}),
    "llama": ("llama", LLAMA | SIZES),
    "llama-tied": ("llama", LLAMA | SIZES | {"tie_word_embeddings": True}),
    "llama-biases": ("llama", LLAMA | SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", LLAMA | SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        "llama", LLAMA | SIZES | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2": ("qwen2", LLAMA | SIZES | {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "qwen2", LLAMA | SIZES | {"rope_parameters": {k: v for k, v in YARN_ROPE.items() if "beta" not in k}},
    ),
    "qwen3": ("qwen3", LLAMA | SIZES | {"head_dim": 24, "num_attention_heads": 8}),
    "qwen3-moe": ("qwen3-moe", QWEN3_MOE | SIZES | EXPERT_SIZES | {"mlp_only_layers": [1]}),
    "mixtral": ("mixtral", MIXTRAL | SIZES),
    "gpt-oss": ("gpt-oss", GPT_OSS | SIZES | {"head_dim": 16}),
    "qwen2-moe": (
        "qwen2-moe",
        QWEN2_MOE
        | SIZES
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
    "glm4-moe": ("glm4-moe", GLM4_MOE | SIZES | EXPERT_SIZES | {"use_qk_norm": True, "attention_bias": True}),
    "dots1": ("dots1", DOTS1 | SIZES | EXPERT_SIZES),
    "phi3": ("phi3", LLAMA | SIZES | {"sliding_window": 7}),
    "gemma2": ("gemma2", GEMMA | SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}),
    # Files do not say which layers of SmolLM3 rotate: all but every fourth.
    "smollm3": ("smollm3", SMOLLM3 | SIZES | {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "granite": ("granite", GRANITE | SIZES | {"attention_bias": True}),
    "olmo2": ("olmo2", LLAMA | SIZES),
    "olmo3": (
        "olmo3",
        OLMO3 | SIZES | {
            "rope_parameters": {
                FULL: {k: v for k, v in YARN_ROPE.items() if "beta" not in k} | {"attention_factor": 1.3},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3": ("gemma3", GEMMA3 | SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}),
}  # fmt: skip
Q4_K_M = {"ffn_down": "Q6_K", "attn_v": "Q6_K", "token_embd": "Q6_K", "output.": "Q6_K"}


def write(path, variant, kind_of, **options):
    kind, config = VARIANTS[variant]
    reference = make(kind, config | options)
    gguf_files.write_model(path, reference, kind_of)
    return reference.eval()


def load(path, *, whole=True, dtype=torch.float32, options=None, available=1 << 30):
    """As a worker on the CPU does, or without its packer."""
    config = read_model_config(path, model=str(path))

    def packer(outline):
        return LinearPacker(_core.CpuThreads(1), options or LinearOptions(), outline, outline.tied_embedding, 0)

    return load_model(config, LoadConfig(), dtype, torch.device("cpu"), available, packer if whole else None)


def check(reference, model):
    requests = [Request(prompt, 16) for prompt in prompts(97, [1, 2, 5, 9, 17, 30])]
    NaiveEngine(model, chunk=11).run(requests)
    assert len({token for r in requests for token in r.output}) >= 4, "it repeats itself"
    clear = sum(assert_matches(reference, r) for r in requests)
    assert clear > 0.9 * sum(len(r.output) for r in requests), "margins too small to say anything"


WHOLE_KINDS = ("int8", "w8a8", "int6", "w6a8", "int4", "w4a8")


def whole_layers(model):
    kernels = [module.kernel for module in model.modules() if isinstance(module, Linear)]
    return [k for k in kernels if isinstance(k, CoreLinear) and k.packed.kind in WHOLE_KINDS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_q8_0_is_computed_from_its_own_whole_numbers(variant, tmp_path):
    path = tmp_path / "m-Q8_0.gguf"
    reference = write(path, variant, lambda _: "Q8_0")
    model = load(path)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert all(linear.weight.device.type == "meta" for linear in linears), "a layer is there twice"
    # The gate of a shared expert has one output, and is stored as a vector in F32.
    rounded = [linear for linear in linears if linear.weight.shape[0] > 1]
    assert len(whole_layers(model)) == len(rounded) > 0
    assert len(linears) - len(rounded) == (2 if variant == "qwen2-moe" else 0)
    if model.lm_head is None:
        assert model.head_kernel.packed.kind == "int8"
    check(reference, model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_f16_equals_transformers(variant, tmp_path):
    path = tmp_path / "m-F16.gguf"
    reference = write(path, variant, lambda _: "F16")
    check(reference, load(path))


@pytest.mark.parametrize("kind", ["IQ4_NL", "MXFP4"])
def test_codes_of_4_bits_that_stand_for_whole_numbers(kind, tmp_path):
    path = tmp_path / "m.gguf"
    reference = write(path, "llama", lambda _: kind)
    model = load(path)
    assert {kernel.packed.kind for kernel in whole_layers(model)} == {"int4" if kind == "MXFP4" else "int8"}
    check(reference, model)


def test_gpt_oss_as_it_is_published(tmp_path):
    """Experts in MXFP4, their biases, sinks and the router in F32, all else in Q8_0."""
    path = tmp_path / "m-MXFP4.gguf"
    kinds = {"_exps.weight": "MXFP4", "ffn_gate_inp.weight": "F32"}
    reference = write(
        path, "gpt-oss", lambda name: next((kind for end, kind in kinds.items() if name.endswith(end)), "Q8_0")
    )
    model = load(path, options=LinearOptions("core"))
    for layer in model.layers:
        assert layer.mlp.gate.kernel.packed.kind == "f32"
        experts = [module for module in layer.mlp.experts.modules() if isinstance(module, Linear)]
        assert {linear.kernel.packed.kind for linear in experts} == {"int4"}
    check(reference, model)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_sinks.weight", b"blk.1.attn_sunk!.weight"))
    with pytest.raises(ModelLoadError, match=r"tensor 'blk.1.attn_sinks.weight' is missing"):
        load(path)


@pytest.mark.parametrize("shape", [(6, 64, 1), (6,)])
def test_biases_of_experts_of_another_shape_are_refused(shape, tmp_path):
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gpt-oss")
    gguf_files.write_config(writer, make("gpt-oss", VARIANTS["gpt-oss"][1]).config, "gpt-oss")
    writer.add_tensor("token_embd.weight", torch.zeros(97, 64).numpy())
    writer.add_tensor("blk.0.ffn_up_exps.bias", torch.zeros(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'blk.0.ffn_up_exps.bias' has the shape .* must have 2 dimensions"):
        load(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F32"])
@pytest.mark.parametrize("whole", [True, False])
def test_every_type_of_small_blocks(kind, whole, tmp_path):
    path = tmp_path / f"m-{kind}.gguf"
    reference = write(path, "llama", lambda _: kind)
    model = load(path, whole=whole)
    kinds = {kernel.packed.kind for kernel in whole_layers(model)}
    assert kinds == ({"int4" if "4" in kind else "int8"} if whole and kind[0] == "Q" else set())
    check(reference, model)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize("kinds", [{}, Q4_K_M, {"": "Q5_K"}, {"": "Q6_K"}], ids=["Q4_K", "Q4_K_M", "Q5_K", "Q6_K"])
def test_large_blocks_mixed_as_they_are(kinds, variant, tmp_path):
    path = tmp_path / "m.gguf"

    def kind_of(name):
        return next((kind for part, kind in kinds.items() if part in name), "Q4_K")

    large = {"n_embd": 256, "n_layer": 2} if variant == "gpt2" else LARGE
    if variant == "gemma2":
        large = large | {"head_dim": 64, "query_pre_attn_scalar": 64}
    if variant == "qwen3-moe":
        large = large | {"head_dim": 64, "moe_intermediate_size": 256}
    reference = write(path, variant, kind_of, **large)
    model = load(path)
    whole = whole_layers(model)
    assert len(whole) == len([module for module in model.modules() if isinstance(module, Linear)])
    expected = {"Q5_K": {"int8"}, "Q6_K": {"int6"}}.get(kinds.get(""), {"int4"})
    assert {kernel.packed.kind for kernel in whole} >= (expected | {"int6"} if "ffn_down" in kinds else expected)
    check(reference, model)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4.5), ("Q4_1", 5), ("Q4_K", 4.5), ("Q8_0", 8.5), ("Q6_K", 6.5625)])
def test_layers_take_little_more_than_their_blocks(kind, bits, tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "llama", lambda _: kind, **LARGE)
    model = load(path)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(whole_layers(model)) == len(linears)
    stored = sum(linear.weight.numel() for linear in linears) * bits / 8
    assert stored <= sum(kernel.nbytes for kernel in whole_layers(model)) <= 1.1 * stored


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "gpt2-untied"])
def test_embeddings_are_looked_up_in_their_blocks_or_in_the_head(kind, variant, tmp_path):
    path = tmp_path / "m.gguf"
    large = {"n_embd": 256, "n_inner": 512} if variant == "gpt2-untied" else LARGE
    reference = write(path, variant, lambda _: kind, **large)
    model = load(path)
    table = model.embed_tokens
    assert isinstance(table.kernel, PackedEmbedding if variant == "llama-tied" else BlockEmbedding)
    assert table.weight.device.type == "meta", "its numbers are there twice"
    ids = torch.tensor([[3, 96, 0], [7, 3, 50]])
    expected = reference.get_input_embeddings().weight[ids]
    torch.testing.assert_close(table(ids), expected.detach(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("kinds", [{"": "Q8_0"}, Q4_K_M, {"": "Q5_K"}], ids=["Q8_0", "Q4_K_M", "Q5_K"])
@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
@pytest.mark.parametrize("rounds", [True, False], ids=["rounded activations", "float activations"])
def test_what_is_kept_takes_what_is_predicted(kinds, variant, rounds, tmp_path):
    path = tmp_path / "m.gguf"
    reference = write(
        path, variant, lambda name: next((k for part, k in kinds.items() if part in name), "Q4_K"), **LARGE
    )
    model = load(path, options=LinearOptions("core", matrix_unit=False, round_activations=rounds))
    kernels = {id(k): k.nbytes for k in [*whole_layers(model), *([model.head_kernel] if model.lm_head is None else [])]}
    if isinstance(model.embed_tokens.kernel, BlockEmbedding):
        kernels[0] = model.embed_tokens.kernel.nbytes
    norms = sum(4 * parameter.numel() for parameter in reference.parameters() if parameter.dim() == 1)
    assert {k.packed.kind[0] for k in whole_layers(model)} == {"w" if rounds else "i"}
    kept = kept_layers(read_forms(path), 4, round_activations=rounds)
    predicted = sum(layer.num_bytes for layer in kept)
    assert predicted == pytest.approx(sum(kernels.values()) + norms, rel=0.05)
    read = [layer for layer in kept if layer.is_read]
    assert sum(layer.num_parameters for layer in read) == sum(
        parameter.numel() for name, parameter in reference.named_parameters()
        if "embed_tokens" not in name or variant == "llama-tied"
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_rounded_activations_stay_near(kind, tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "llama", lambda _: kind, **LARGE)
    exact, rounded = load(path), load(path, options=LinearOptions(round_activations=True))
    linears = [[m for m in model.modules() if isinstance(m, Linear)] for model in (exact, rounded)]
    for one, other in zip(*linears, strict=True):
        kinds = ("int6", "w6a8") if kind == "Q6_K" else ("int4", "w4a8")
        assert (one.kernel.packed.kind, other.kernel.packed.kind) == kinds
        assert torch.equal(one.kernel.unpack(64), other.kernel.unpack(64))
        x = torch.randn((5, one.weight.shape[1]), generator=torch.Generator().manual_seed(0))
        expected = one(x)
        assert 0 < float((other(x) - expected).norm() / expected.norm()) < 0.02


def test_a_fused_layer_with_one_part_in_other_blocks_has_minima(tmp_path):
    path = tmp_path / "m.gguf"
    reference = write(path, "llama", lambda name: "Q4_1" if "attn_v" in name else "Q8_0")
    model = load(path)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(whole_layers(model)) == len(linears)
    assert len([k for k in whole_layers(model) if k.packed.has_form]) == reference.config.num_hidden_layers
    check(reference, model)


def test_parts_of_two_groups_take_the_smaller(tmp_path):
    path = tmp_path / "m.gguf"
    reference = write(path, "llama", lambda name: "Q6_K" if "attn_v" in name else "Q8_0", **LARGE)
    model = load(path)
    assert len(whole_layers(model)) == len([m for m in model.modules() if isinstance(m, Linear)])
    check(reference, model)


def test_half_precision_keeps_the_whole_numbers(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "llama", lambda _: "Q8_0")
    exact, rounded = load(path), load(path, dtype=torch.bfloat16)
    for one, other in zip(whole_layers(exact), whole_layers(rounded), strict=True):
        assert torch.equal(one.unpack(one.packed.out_features), other.unpack(other.packed.out_features))


def test_what_is_rounded_on_request_is_what_could_not_be_kept(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "llama", lambda name: "F16" if "ffn_down" in name else "Q8_0")
    model = load(path, options=LinearOptions("core", "int8", 32))
    kept = load(path)
    for ours, exact in zip(model.layers, kept.layers, strict=True):
        a, b = (each.self_attn.o_proj.kernel for each in (ours, exact))
        assert torch.equal(a.unpack(64), b.unpack(64))
        assert ours.mlp.down_proj.kernel.packed.kind == "int8"
        assert exact.mlp.down_proj.kernel not in whole_layers(kept)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write(path, "llama", lambda _: "Q8_0")
    batches, pack_files = [], LinearPacker.pack_files

    def cut(packer, layers, tables):
        batches.append(layers)
        rows = layers[4][3]
        with path.open("r+b") as file:
            file.truncate(rows.offset + rows.row_bytes + 1)
        return pack_files(packer, layers, tables)

    monkeypatch.setattr(LinearPacker, "pack_files", cut)
    with pytest.raises(ModelLoadError, match=r"ended within tensor .* the file shrank while it was read"):
        load(path)
    assert len(batches) == 1
    assert len(batches[0]) > 5


@pytest.mark.parametrize("variant", ["gpt2-untied", "llama-biases", "phi3", "gemma2", "gemma3", "qwen3", "olmo3"])
def test_messages_have_the_names_of_the_file(variant, tmp_path):
    import gguf

    path = tmp_path / "whole.gguf"
    write(path, variant, lambda _: "F32")
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert {file_name(name, GgufFile(path).architecture) for name in read_gguf_headers(path)} == names
    content = path.read_bytes()
    for old, new in (
        (b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight"),
        (b"output_norm.weight", b"output_nerm.weight"),
    ):
        assert content.count(old) == 1
        content = content.replace(old, new)
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    for name in ("blk.1.ffn_down.weight", "output_norm.weight"):
        assert f"tensor '{name}' is missing" in str(caught.value)
    assert "whole.gguf: tensor 'blk.1.ffn_dawn.weight' is unexpected" in str(caught.value)


def test_messages_name_the_tensor_of_all_experts_once(tmp_path):
    path = tmp_path / "m.gguf"
    write(path, "mixtral", lambda _: "F32")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down_exps.weight", b"blk.1.ffn_dawn_exps.weight"))
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert str(caught.value).count("tensor 'blk.1.ffn_down_exps.weight' is missing") == 1


@pytest.mark.parametrize("shape", [(64, 32), (2, 64, 32), (4, 64, 32, 1)])
def test_experts_of_another_shape_are_refused(shape, tmp_path):
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    gguf_files.write_config(writer, make("mixtral", VARIANTS["mixtral"][1]).config, "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(97, 64).numpy())
    writer.add_tensor("blk.0.ffn_up_exps.weight", torch.zeros(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = "is missing" if len(shape) == 3 else "'blk.0.ffn_up_exps.weight' has the shape .* must have 3 dimensions"
    with pytest.raises(ModelLoadError, match=expected):
        load(path)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_experts_that_older_converters_stored_one_by_one(kind, tmp_path):
    import gguf

    reference = write(tmp_path / "stacked.gguf", "mixtral", lambda _: kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    gguf_files.write_config(writer, reference.config, "llama")
    for tensor in gguf.GGUFReader(tmp_path / "stacked.gguf").tensors:
        stem, is_stack, _ = tensor.name.partition("_exps.")
        parts = {f"{stem}.{i}.weight": part for i, part in enumerate(tensor.data)} if is_stack else {}
        for name, data in (parts or {tensor.name: tensor.data}).items():
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check(reference, load(tmp_path / "m.gguf"))


def test_a_shard_is_part_of_the_model(tmp_path):
    import gguf

    reference = make(*("llama", VARIANTS["llama"][1]))
    gguf_files.write_model(tmp_path / "whole.gguf", reference, lambda _: "Q8_0")
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    names = [tensor.name for tensor in reader.tensors]
    for part, chosen in enumerate([names[:7], names[7:]]):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{part + 1}-of-00002.gguf", "llama")
        if part == 0:
            gguf_files.write_config(writer, reference.config, "llama")
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in reader.tensors:
            if tensor.name in chosen:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    check(reference.eval(), load(tmp_path / "m-00001-of-00002.gguf"))
