"""Models whose layers are in stages, against one process: the same logits and ids, each rank with its layers alone."""

import pytest
import torch
from checkpoints import ARCHITECTURES, VARIANTS
from quantized_models import AWQ, GPTQ, write
from safetensors.torch import save_file
from test_tensor_parallel import ROOM, assert_equal, config_of, save

from mxfp4_files import write_mxfp4
from quantized_files import awq, gptq
from rank_world import NUM_DECODES, RankWorld, job_of, load_job, run_job
from rustvllm import _core
from rustvllm.distributed.rank_group import ALONE
from rustvllm.distributed.stages import RankPlace, Stage
from rustvllm.exceptions import ModelLoadError

FOUR_LAYERS = {"num_hidden_layers": 4, "n_layer": 4}


def deep(kind, **options):
    """A configuration of four layers."""
    names = ["n_layer"] if kind == "gpt2" else ["num_hidden_layers"]
    return config_of(kind, **{name: FOUR_LAYERS[name] for name in names}, **options)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with RankWorld(2, tmp_path_factory.mktemp("two"), num_stages=2) as world:
        yield world


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """Two stages of two ranks."""
    with RankWorld(4, tmp_path_factory.mktemp("square"), num_stages=2) as world:
        yield world


def test_ranks_are_numbered_so_that_the_last_stage_is_rank_0s():
    places = [RankPlace(rank, 2, 3) for rank in range(6)]
    assert [(place.stage, place.tensor_rank) for place in places] == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]


def test_layers_are_shared_evenly_and_the_last_stage_has_no_more_than_others():
    for num_layers in range(1, 20):
        for count in range(1, num_layers + 1):
            own = [Stage(index, count).own(num_layers) for index in range(count)]
            assert [layer for each in own for layer in each] == list(range(num_layers))
            sizes = list(map(len, own))
            assert max(sizes) - min(sizes) <= 1
            assert sizes[-1] == min(sizes)
    with pytest.raises(ModelLoadError, match=r"-parallel-size 3 is more than the 2 layers .* at most 2 would"):
        Stage(0, 3).own(2)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_two_stages_give_what_one_process_gives(two, kind):
    for quantization in (None, "int8"):
        job = job_of(config=deep(kind), quantization=quantization, RUSTVLLM_LINEAR_KERNEL="core")
        expected, alone = run_job(job)
        found, ranks = two.run(job)
        assert_equal(found, expected)
        assert [rank["layers"] for rank in ranks] == [2, 2]
        assert ranks[0]["collectives"] == 1 + NUM_DECODES, "the last stage did not wait for each step's rows"
        assert [rank["is_one_call"] for rank in ranks] == [True, True]
        assert alone["is_one_call"]


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gpt-neox", "opt", "gemma3"])
def test_modules_give_it_too(two, kind):
    job = job_of(config=deep(kind), decoder="modules")
    found, ranks = two.run(job)
    assert_equal(found, run_job(job)[0])
    assert not any(rank["is_one_call"] for rank in ranks)


@pytest.mark.parametrize(
    "variant",
    [
        "gpt2-untied", "gpt2-scalings", "llama-tied", "qwen2-tied-window", "phi3-window-tied", "gemma3-scaled-capped",
        "opt-post-norm-projected", "gpt-neox-sequential-tied", "granite-biases-tied-thirds", "olmo3-layer-types-yarn",
    ],
)  # fmt: skip
def test_variants_of_the_families(two, variant):
    kind, options = VARIANTS[variant]
    job = job_of(config=config_of(kind, **options))
    found, _ = two.run(job)
    assert_equal(found, run_job(job)[0])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_bfloat16_is_handed_on_bit_by_bit(two, kind):
    job = job_of(config=deep(kind), dtype="bfloat16")
    found, _ = two.run(job)
    assert torch.equal(found, run_job(job)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_two_stages_of_two_ranks(square, kind):
    for quantization in (None, "int8"):
        job = job_of(config=deep(kind), quantization=quantization, RUSTVLLM_LINEAR_KERNEL="core")
        expected, alone = run_job(job)
        found, ranks = square.run(job)
        assert_equal(found, expected)
        assert [rank["layers"] for rank in ranks] == [2, 2, 2, 2]
        assert all(rank["kv_heads"] <= max(1, alone["kv_heads"] // 2) for rank in ranks)
        assert all(rank["collectives"] >= (1 + NUM_DECODES) * 4 for rank in ranks), "the ranks of a stage did not meet"


@pytest.mark.slow
def test_four_stages_of_a_layer(tmp_path):
    with RankWorld(4, tmp_path, num_stages=4) as four:
        for kind in ARCHITECTURES:
            job = job_of(config=deep(kind), quantization="int8")
            found, ranks = four.run(job)
            assert_equal(found, run_job(job)[0])
            assert [rank["layers"] for rank in ranks] == [1, 1, 1, 1]
        with pytest.raises(RuntimeError, match=r"4 ranks: .* --pipeline-parallel-size 4 is more than the 2"):
            four.run(job_of(config=config_of("llama", num_hidden_layers=2)))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["stories260K", "slm4096-gpt2"])
def test_shipped_checkpoints(two, shared_dir, name, quantization):
    job = job_of(shared_dir / "data" / name / "hf", quantization=quantization)
    expected, alone = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    assert sum(rank["layers"] for rank in ranks) == alone["layers"]
    assert all(0 < rank["read"] < alone["read"] for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories260K", "slm4096-gpt2"])
def test_shipped_checkpoints_on_two_stages_of_two_ranks(square, shared_dir, name):
    for quantization in (None, "int8"):
        job = job_of(shared_dir / "data" / name / "hf", quantization=quantization)
        found, _ = square.run(job)
        assert_equal(found, run_job(job)[0])


LARGE = {"vocab_size": 300, "hidden_size": 128, "num_attention_heads": 4}
CHECKPOINTS = {
    "llama": deep("llama", **LARGE, num_key_value_heads=4, intermediate_size=384, head_dim=32),
    "gpt2": deep("gpt2", vocab_size=300, n_embd=128, n_head=4),
    "opt": deep("opt", **LARGE, ffn_dim=512),
    "gpt-neox": deep("gpt-neox", **LARGE, intermediate_size=512),
    "gemma3": deep("gemma3", **LARGE, num_key_value_heads=4, intermediate_size=384, head_dim=32),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_stage_holds_and_reads_its_layers_and_what_is_at_its_end(two, tmp_path, kind, quantization):
    assert_weights_are_divided(two, tmp_path, kind, quantization)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_so_do_the_ranks_that_share_a_stage(square, tmp_path, kind):
    assert_weights_are_divided(square, tmp_path, kind, None)


def assert_weights_are_divided(world, tmp_path, kind, quantization):
    folder, _ = save(tmp_path, CHECKPOINTS[kind])
    job = job_of(folder, quantization=quantization, RUSTVLLM_LINEAR_KERNEL="core")
    expected, alone = run_job(job)
    found, ranks = world.run(job)
    assert_equal(found, expected)
    for rank in ranks:
        # Embedding, positions and head are at one end or both, and are not divided by the number of stages.
        ends = 4 * rank["tables"]
        replicated = 4 * rank["replicated"] if world.size > 2 else 0
        print(  # noqa: T201 -- the figures behind the assertions
            f"{kind} {quantization or 'float32'}, {world.size} ranks: {rank['resident']} of {alone['resident']} "
            f"bytes of weights ({ends} at the ends, {replicated} replicated), {rank['read']} of "
            f"{alone['read']} bytes read"
        )
        assert rank["resident"] <= ROOM * alone["resident"] / world.size + ends + replicated
        assert rank["read"] <= ROOM * alone["read"] / world.size + ends + replicated
    tables = sum(rank["tables"] for rank in ranks)
    assert sum(rank["products"] for rank in ranks) <= ROOM * alone["products"] + tables


def load(job, stage):
    return load_job(job, ALONE, _core.CpuThreads(1), stage)


def test_a_stage_loads_the_layers_of_its_numbers(tmp_path):
    folder, whole = save(tmp_path, CHECKPOINTS["llama"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSTVLLM_LINEAR_KERNEL", "torch")
        parts = [dict(load(job_of(folder), Stage(index, 3))[0].named_parameters()) for index in range(3)]
    seen = {}
    for part in parts:
        assert not seen.keys() & part.keys()
        seen |= part
    assert seen.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(seen[name], parameter) for name, parameter in whole.named_parameters())
    assert [name for name in parts[0] if not name.startswith("layers.")] == ["embed_tokens.weight"]
    assert [name for name in parts[1] if not name.startswith("layers.")] == []
    assert [name for name in parts[2] if not name.startswith("layers.")] == ["norm.weight", "lm_head.weight"]


def test_a_checkpoint_that_lacks_a_layer_or_has_another_is_refused_by_the_stage_that_has_it(tmp_path):
    folder, model = save(tmp_path, CHECKPOINTS["llama"])
    tensors = {"model." + name: tensor.detach().contiguous() for name, tensor in model.checkpoint_tensors().items()}
    tensors["lm_head.weight"] = model.lm_head.weight.detach()
    lacking = dict(tensors)
    del lacking["model.layers.3.mlp.up_proj.weight"]
    save_file(lacking, folder / "model.safetensors")
    load(job_of(folder), Stage(0, 2))
    with pytest.raises(ModelLoadError, match=r"'layers.3.mlp.up_proj.weight' is missing"):
        load(job_of(folder), Stage(1, 2))
    save_file(tensors | {"model.layers.4.mlp.up_proj.weight": torch.zeros(3)}, folder / "model.safetensors")
    for index in range(2):
        with pytest.raises(ModelLoadError, match=r"'model.layers.4.mlp.up_proj.weight' is unexpected"):
            load(job_of(folder), Stage(index, 2))


@pytest.mark.parametrize("stored_as", ["embedding", "head", "both"])
def test_a_tied_embedding_is_at_both_ends_however_it_is_stored(two, tmp_path, stored_as):
    folder, model = save(tmp_path, deep("llama", tie_word_embeddings=True))
    tensors = {"model." + name: tensor.detach().contiguous() for name, tensor in model.checkpoint_tensors().items()}
    name = "model.embed_tokens.weight"
    if stored_as == "both":
        tensors["lm_head.weight"] = torch.randn(tensors[name].shape)
    elif stored_as == "head":
        tensors["lm_head.weight"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    job = job_of(folder)
    found, _ = two.run(job)
    assert_equal(found, run_job(job)[0])


@pytest.mark.slow
def test_what_is_stored_in_blocks_goes_to_its_stage(two, tmp_path):
    gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)
    from checkpoints import make

    path = tmp_path / "m.gguf"
    options = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    gguf_files.write_model(path, make("llama", options), lambda name: "Q8_0" if name.endswith("weight") else "F32")
    job = job_of(path)
    found, ranks = two.run(job)
    assert_equal(found, run_job(job)[0])
    assert all(rank["read"] > 0 for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), [("llama", "awq"), ("qwen2", "gptq")])
def test_quantised_folders_go_to_their_stages(two, tmp_path, family, form):
    lay_out, settings = {"awq": (awq, AWQ), "gptq": (gptq, GPTQ)}[form]
    write(tmp_path, family, settings, lay_out)
    job = job_of(tmp_path)
    expected, alone = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    assert all(0 < rank["read"] < 0.9 * alone["read"] for rank in ranks)


@pytest.mark.slow
def test_experts_in_mxfp4_go_to_their_stages(two, tmp_path):
    from checkpoints import make

    options = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 6}
    write_mxfp4(tmp_path, make("gpt-oss", options))
    job = job_of(tmp_path)
    expected, alone = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    assert all(0 < rank["read"] < 0.9 * alone["read"] for rank in ranks)


def test_a_stage_alone_does_not_run():
    model, _ = load(job_of(config=deep("llama")), Stage(1, 2))
    with pytest.raises(RuntimeError, match="stage 1 cannot run: it has no link to stage 0"), torch.inference_mode():
        model(torch.zeros(3, dtype=torch.int32), torch.arange(3), [], None)
