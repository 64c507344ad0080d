"""Weights stored in 16 bits, in a model in float32: packed as they are stored, they give what float32 gives."""

import numpy as np
import pytest
import torch
from checkpoints import LLAMA, make, oracle_logits
from safetensors.torch import load_file, save_file

from rustvllm import LLM, SamplingParams, _core
from rustvllm.config import LoadConfig
from rustvllm.config.model_folder import read_model_config
from rustvllm.layers.cpu.embedding import NarrowEmbedding, PackedEmbedding
from rustvllm.layers.cpu.linear import CoreLinear
from rustvllm.layers.cpu.narrow import NARROW_KINDS
from rustvllm.layers.cpu.options import LinearOptions
from rustvllm.layers.cpu.packer import LinearPacker
from rustvllm.layers.linear import Linear
from rustvllm.model_loader import load_model
from rustvllm.model_loader.reading import TensorReader

WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 320, "num_hidden_layers": 2}
EXACT = LinearOptions("core", matrix_unit=False)
"""The core's products alone, whose bits do not depend on the kind that the same numbers are kept in."""


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def stored(request):
    """What the numbers are stored in."""
    return request.param


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def folders(request, stored, tmp_path_factory):
    """A Llama in 16 bits, and the same numbers in float32."""
    model = make("llama", WIDE | {"tie_word_embeddings": request.param})
    found = []
    for dtype in (stored, torch.float32):
        folder = tmp_path_factory.mktemp(str(dtype).removeprefix("torch."))
        model.to(stored).to(dtype).save_pretrained(folder)
        found.append(folder)
    return found


def load(folder, options, available=1 << 40):
    packers = []

    def packer(outline):
        packers.append(LinearPacker(_core.CpuThreads(1), options, outline, outline.tied_embedding, 0))
        return packers[-1]

    config = read_model_config(folder, model=str(folder), max_model_len=64)
    return load_model(config, LoadConfig(), torch.float32, torch.device("cpu"), available, packer), packers[-1]


def kernels(model):
    layers = [module.kernel for module in model.modules() if isinstance(module, Linear)]
    return [kernel for kernel in [*layers, model.head_kernel] if isinstance(kernel, CoreLinear)]


def test_the_bits_are_those_of_float32_in_half_of_the_memory(folders, stored):
    (narrow, _), (wide, _) = load(folders[0], EXACT), load(folders[1], EXACT)
    assert {kernel.packed.kind for kernel in kernels(narrow)} == {NARROW_KINDS[stored]}
    assert {kernel.packed.kind for kernel in kernels(wide)} == {"f32"}
    assert sum(kernel.nbytes for kernel in kernels(narrow)) < 0.52 * sum(kernel.nbytes for kernel in kernels(wide))
    linears = [pair for pair in zip(narrow.modules(), wide.modules(), strict=True) if isinstance(pair[0], Linear)]
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in linears:
        x = torch.randn((9, ours.weight.shape[1]), generator=generator)
        assert torch.equal(ours(x), theirs(x))
    hidden = torch.randn((5, 256), generator=generator)
    assert torch.equal(narrow.compute_logits(hidden), wide.compute_logits(hidden))


def test_no_layer_is_there_in_float32_while_it_is_read(folders, monkeypatch):
    read_into, shapes = TensorReader.read_into, []

    def record(self, stored, target):
        shapes.append(tuple(target.shape))
        read_into(self, stored, target)

    monkeypatch.setattr(TensorReader, "read_into", record)
    model, _ = load(folders[0], EXACT)
    assert len(kernels(model)) == 9, "four fused maps of each layer, and the head"
    assert (256,) in shapes, "norms are filled as ever"
    # A tied head is packed from the embedding.
    embedding = [] if model.lm_head is not None else [tuple(model.embed_tokens.weight.shape)]
    assert [shape for shape in shapes if len(shape) == 2] == embedding


@pytest.mark.parametrize(
    "options", [EXACT, LinearOptions("core", "int8", matrix_unit=False)], ids=["as stored", "int8"]
)
def test_vectors_are_looked_up_in_what_is_stored(folders, options):
    (narrow, _), (wide, _) = load(folders[0], options), load(folders[1], options)
    is_packed = narrow.lm_head is None and options.kind is None
    assert isinstance(narrow.embed_tokens.kernel, PackedEmbedding if is_packed else NarrowEmbedding)
    assert narrow.embed_tokens.weight.is_meta, "the numbers are there a second time"
    assert wide.embed_tokens.kernel is None
    for ids in (
        torch.tensor([0, 319, 7, 7], dtype=torch.int32),
        torch.arange(320).view(2, 160),
        torch.tensor([], dtype=torch.int64),
    ):
        found = narrow.embed_tokens(ids)
        assert found.dtype == torch.float32
        assert torch.equal(found, wide.embed_tokens(ids))


def test_a_row_that_there_is_not_is_refused():
    packed = _core.PackedLinear(_core.CpuThreads(1), 3, 2, "f32")
    packed.pack_rows(0, np.arange(6, dtype=np.float32).reshape(3, 2))
    out = np.zeros((2, 2), np.float32)
    packed.unpack_rows(np.array([2, 0]), out)
    assert out.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    for row in (3, -1, 1 << 40):
        with pytest.raises(ValueError, match=f"row {row} is asked for, but there are 3"):
            packed.unpack_rows(np.array([0, row]), out)
    with pytest.raises(ValueError, match=r"out has the shape \(2, 2\), but \(1, 2\) is needed"):
        packed.unpack_rows(np.array([0]), out)


def test_what_loading_needs_is_counted_so(folders):
    (narrow, packer), (_, plain) = load(folders[0], EXACT), load(folders[1], EXACT)
    size = sum(parameter.nbytes for parameter in load(folders[1], LinearOptions("torch"))[0].parameters())
    layers = sum(module.kernel.nbytes for module in narrow.modules() if isinstance(module, Linear))
    layers += narrow.embed_tokens.weight.nbytes // 2
    assert plain.resident_bytes(size) == size
    assert packer.resident_bytes(size) == pytest.approx(size - layers, rel=0.01)
    load(folders[0], EXACT, available=size * 3 // 4)
    with pytest.raises(Exception, match="are free on cpu"):
        load(folders[1], EXACT, available=size * 3 // 4)


def test_a_layer_with_another_part_is_not_rounded(folders, stored, tmp_path):
    for path in folders[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("0.self_attn.k_proj.weight"))
    tensors[name] = tensors[name].float() * 1.001
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, _ = load(tmp_path, EXACT)
    kinds = [kernel.packed.kind for kernel in kernels(model)]
    assert kinds.count("f32") == 1
    assert kinds.count(NARROW_KINDS[stored]) > 3
    [mixed] = [kernel for kernel in kernels(model) if kernel.packed.kind == "f32"]
    num_heads, num_kv_heads = WIDE["num_attention_heads"], WIDE["num_key_value_heads"]
    num_queries = 256 if "head_dim" not in WIDE else num_heads * WIDE["head_dim"]
    num_keys = num_queries // num_heads * num_kv_heads
    assert torch.equal(mixed.unpack(num_queries + num_keys)[num_queries:], tensors[name])


def test_the_engine_generates_what_transformers_does(folders):
    llm = LLM(str(folders[0]), max_model_len=64, num_gpu_blocks_override=64, skip_tokenizer_init=True)
    assert llm.llm_engine.config.model.dtype == "float32"
    prompt = torch.randint(320, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    [output] = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), use_tqdm=False
    )
    tokens = [*prompt, *output.outputs[0].token_ids]
    from transformers import AutoModelForCausalLM

    logits = oracle_logits(AutoModelForCausalLM.from_pretrained(folders[1]).eval(), tokens, len(prompt))
    best = logits.topk(2).values
    sure = best[:, 0] - best[:, 1] > 1e-3
    assert sure.any()
    assert (logits.argmax(-1)[sure] == torch.tensor(output.outputs[0].token_ids)[sure]).all()
