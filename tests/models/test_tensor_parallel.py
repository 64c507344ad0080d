"""Models that ranks share, against one process: the same logits and ids, a part of the weights, a part of the bytes."""

import json
from types import SimpleNamespace

import pytest
import torch
from checkpoints import ARCHITECTURES, GPT2, LLAMA, VARIANTS, make
from safetensors.torch import save_file

from rank_world import NUM_DECODES, RankWorld, job_of, load_job, run_job
from rustvllm import _core
from rustvllm.config.hub import embedded_model_path
from rustvllm.distributed.rank_group import RankGroup
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.parallel import Part, shard_of
from rustvllm.lora.modules import adaptable_parts
from rustvllm.model_loader.quantized_tensors import QuantizedTensor
from rustvllm.model_loader.slicing import Slices, check_cuts
from rustvllm.models.registry import make_model

TOLERANCE, MARGIN = 1e-4, 1e-3
ROOM = 1.05
ONE_CALL = {
    "gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "phi3", "qwen3-moe", "mixtral", "gpt-oss", "qwen2-moe",
    "glm4-moe", "dots1", "smollm3", "granite",
}  # fmt: skip
"""Families whose blocks run in halves of one call."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with RankWorld(2, tmp_path_factory.mktemp("two")) as world:
        yield world


def config_of(kind, **options):
    return ARCHITECTURES[kind][2] | {"architectures": [ARCHITECTURES[kind][1]], "model_type": kind} | options


def assert_equal(found, expected):
    """Log-probabilities within the tolerance, and the same ids wherever one process is sure."""
    assert found.shape == expected.shape
    assert found.shape[0] == 1 + NUM_DECODES
    distance = (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()
    assert distance <= TOLERANCE
    top = expected.topk(2).values
    clear = top[..., 0] - top[..., 1] > MARGIN
    assert clear.sum() >= clear.numel() // 2
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_two_ranks_give_what_one_process_gives(two, kind, quantization):
    job = job_of(config=config_of(kind), quantization=quantization, RUSTVLLM_LINEAR_KERNEL="core")
    expected, alone = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    assert alone["collectives"] == 0
    for rank in ranks:
        layers = config_of(kind).get("num_hidden_layers") or config_of(kind)["n_layer"]
        assert rank["collectives"] >= (1 + NUM_DECODES) * (2 * layers + 2), "the ranks did not meet after each half"
        assert (rank["spans"] == (1 + NUM_DECODES) * 2 * layers) == (kind in ONE_CALL)
        assert rank["products"] < 0.6 * alone["products"]


def test_ranks_that_share_no_memory_add_by_gloo(tmp_path):
    with RankWorld(2, tmp_path, meets=False) as world:
        for kind in ("gpt2", "llama"):
            job = job_of(config=config_of(kind))
            found, ranks = world.run(job)
            assert_equal(found, run_job(job)[0])
            assert all(rank["collectives"] > 0 for rank in ranks)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "gpt-neox"])
def test_modules_give_it_too(two, kind):
    job = job_of(config=config_of(kind), decoder="modules")
    expected, _ = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    assert not any(rank["is_one_call"] for rank in ranks)


@pytest.mark.parametrize(
    "variant",
    [
        "gpt2-untied", "gpt2-scalings", "llama-mqa", "llama-tied", "llama-biases", "qwen2-tied-window",
        "phi3-window-tied", "gemma3-scaled-capped", "opt-post-norm-projected", "gpt-neox-sequential-tied",
        "smollm3-listed-window-biases-untied", "granite-biases-tied-thirds", "olmo2-mha-biases",
    ],
)  # fmt: skip
def test_variants_of_the_families(two, variant):
    kind, options = VARIANTS[variant]
    job = job_of(config=config_of(kind, **options))
    found, _ = two.run(job)
    assert_equal(found, run_job(job)[0])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gpt-neox"])
def test_bfloat16_is_as_exact_as_in_one_process(two, kind):
    exact, _ = run_job(job_of(config=config_of(kind)))
    job = job_of(config=config_of(kind), dtype="bfloat16")
    alone, _ = run_job(job)
    found, _ = two.run(job)
    error = (alone - exact).abs().mean()
    assert error > 0
    assert (found - exact).abs().mean() <= 1.5 * error


@pytest.mark.parametrize("decoder", ["core", "modules"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_a_smaller_cache_is_as_exact_as_in_one_process(two, cache_dtype, kind, decoder):
    exact, _ = run_job(job_of(config=config_of(kind)))
    job = job_of(config=config_of(kind), cache_dtype=cache_dtype, decoder=decoder)
    alone, _ = run_job(job)
    found, _ = two.run(job)
    error = (alone - exact).abs().mean()
    assert error > 0, "the cache rounded nothing"
    assert (found - alone).abs().mean() <= 0.5 * error


@pytest.mark.parametrize("quantization", ["int8", "int8-g32", "int4-g32"])
def test_rounded_activations_are_rounded_alike(two, quantization):
    same = []
    for vocab_size in (96, 97, 98, 99):  # each has numbers of its own
        shape = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "head_dim": 32}
        config = config_of("llama", vocab_size=vocab_size, **shape)
        exact, _ = run_job(job_of(config=config, quantization=quantization))
        job = job_of(config=config, quantization=quantization, RUSTVLLM_ACTIVATIONS="int8")
        expected, _ = run_job(job)
        found, _ = two.run(job)
        error = (expected - exact).abs().mean()
        assert error > 1e-3 * exact.abs().mean(), "no activation was rounded"
        assert (found - exact).abs().mean() <= 1.2 * error
        same.append((found - expected).abs().amax(-1) <= 1e-5 * expected.abs().max())
    # Sums that differ in their last bits send a number that is nearly halfway the other way, now and then; all that the
    # request computes from there on differs. Ranks that round in their own ways agree in no row.
    same = torch.stack(same)
    assert same.float().mean() >= 0.5, f"{same.sum()} of {same.numel()} rows are equal"


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["stories260K", "slm4096-gpt2"])
def test_shipped_checkpoints(two, shared_dir, name, quantization):
    assert_a_part_of_it_is_enough(two, shared_dir / "data" / name / "hf", quantization)


@pytest.mark.slow
def test_the_embedded_model_whose_heads_are_three(tmp_path):
    with RankWorld(3, tmp_path) as three:
        for quantization in (None, "int8"):
            assert_a_part_of_it_is_enough(three, embedded_model_path(), quantization)


def assert_a_part_of_it_is_enough(world, folder, quantization):
    job = job_of(folder, quantization=quantization)
    expected, alone = run_job(job)
    found, ranks = world.run(job)
    assert_equal(found, expected)
    assert all(0 < rank["read"] < 1.2 / world.size * alone["read"] for rank in ranks)


@pytest.mark.slow
def test_four_ranks_replicate_heads_and_add_in_their_order(tmp_path):
    with RankWorld(4, tmp_path, in_rank_order=True) as four:
        for heads in (1, 2):
            job = job_of(config=config_of("llama", num_key_value_heads=heads, vocab_size=300))
            found, ranks = four.run(job)
            assert_equal(found, run_job(job)[0])
            assert [rank["kv_heads"] for rank in ranks] == [1, 1, 1, 1]
        job = job_of(config=config_of("gpt2", n_embd=64))
        found, _ = four.run(job)
        assert_equal(found, run_job(job)[0])
        again, _ = four.run(job)
        assert torch.equal(found, again)
        with pytest.raises(
            RuntimeError, match=r"4 ranks: ModelLoadError: .*4 does not divide the 6 attention heads; 1, 2"
        ):
            four.run(job_of(config=config_of("gpt2", n_embd=66, n_head=6)))
        four.run(job)


WIDE = {"vocab_size": 2048, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
CHECKPOINTS = {
    "llama": config_of("llama", **WIDE, intermediate_size=384),
    "phi3": config_of("phi3", **WIDE, intermediate_size=384),
    "gpt2": config_of("gpt2", vocab_size=2048, n_embd=128, n_head=8),
    "opt": config_of("opt", vocab_size=2048, hidden_size=128, ffn_dim=512, num_attention_heads=8),
    "gpt-neox": config_of("gpt-neox", vocab_size=2048, hidden_size=128, intermediate_size=512, num_attention_heads=8),
    "gemma3": config_of("gemma3", **WIDE, intermediate_size=384, head_dim=16),
}


def load(job, rank=0, size=1):
    """A rank's model without its companions: nothing is computed with it."""
    return load_job(job, RankGroup(rank, size), _core.CpuThreads(1))


def save(folder, config, dtype=torch.float32):
    """A checkpoint of the numbers of a dummy model."""
    job = job_of(config=config, RUSTVLLM_LINEAR_KERNEL="torch")
    model, _ = load_plain(job)
    prefix = model.prefixes[0]
    tensors = {prefix + name: tensor for name, tensor in model.checkpoint_tensors().items()}
    if model.lm_head is not None:
        tensors[model.head_name] = model.lm_head.weight
    save_file(
        {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def num_stored(parameter, shard):
    """Numbers of a rank's parameter that the checkpoint has."""
    if shard is None:
        return parameter.numel()
    return sum(part.num_stored for part in shard.parts) * parameter.numel() // max(parameter.shape[shard.dim], 1)


def load_plain(job, rank=0, size=1):
    """As ``load``, with every layer torch's, so that weights can be looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSTVLLM_LINEAR_KERNEL", "torch")
        return load(job, rank, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_rank_reads_its_part_and_nothing_else(tmp_path, kind, dtype):
    folder, whole = save(tmp_path, CHECKPOINTS[kind], dtype)
    job = job_of(folder)
    _, all_bytes = load_plain(job)
    assert all_bytes >= sum(p.numel() for p in whole.parameters()) * dtype.itemsize
    for size in (2, 4, 8):
        heads = {}
        for rank in range(size):
            model, num_bytes = load_plain(job, rank, size)
            own = dict(model.named_parameters())
            shards = {
                f"{path}.{name}".lstrip("."): shard_of(module, name)
                for path, module in model.named_modules()
                for name, _ in module.named_parameters(recurse=False)
            }
            assert sum(shard is not None for shard in shards.values()) > 8
            for name, parameter in whole.named_parameters():
                expected = parameter if shards[name] is None else shards[name].take(parameter)
                assert torch.equal(own[name], expected.to(dtype).to(torch.float32)), f"{name} of rank {rank} of {size}"
            stored = sum(num_stored(own[name], shard) for name, shard in shards.items())
            assert num_bytes == stored * dtype.itemsize
            heads[rank] = model.kv_cache_spec.num_kv_heads
        replicated = sum(own[name].numel() for name, shard in shards.items() if shard is None) * dtype.itemsize
        if size <= whole.kv_cache_spec.num_kv_heads:
            assert num_bytes <= ROOM * all_bytes / size + replicated
        print(  # noqa: T201 -- the figures behind the assertion
            f"{kind}, {size} ranks: {num_bytes} of {all_bytes} bytes read, {replicated} of them by every rank"
        )
        assert set(heads.values()) == {max(1, whole.kv_cache_spec.num_kv_heads // size)}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_rank_holds_and_multiplies_its_part(two, tmp_path, kind):
    folder, _ = save(tmp_path, CHECKPOINTS[kind])
    for quantization in (None, "int8"):
        job = job_of(folder, quantization=quantization, RUSTVLLM_LINEAR_KERNEL="core")
        expected, alone = run_job(job)
        found, ranks = two.run(job)
        assert_equal(found, expected)
        for rank in ranks:
            replicated = 4 * rank["replicated"]
            print(  # noqa: T201 -- the figures behind the assertions
                f"{kind} {quantization or 'float32'}: {rank['resident']} of {alone['resident']} bytes of weights "
                f"({replicated} replicated), {rank['products']} of {alone['products']} multiply-adds, "
                f"{rank['read']} of {alone['read']} bytes read"
            )
            assert rank["resident"] <= ROOM * alone["resident"] / 2 + replicated
            assert rank["products"] <= ROOM * alone["products"] / 2
            assert rank["read"] <= ROOM * alone["read"] / 2 + replicated


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2"])
def test_what_is_stored_in_bfloat16_is_kept_so(two, tmp_path, kind):
    large = {"vocab_size": 2000, "intermediate_size": 1536, "n_inner": 1536}  # smaller layers are torch's
    folder, _ = save(tmp_path, CHECKPOINTS[kind] | large, torch.bfloat16)
    job = job_of(folder)
    expected, alone = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    for rank in ranks:
        assert rank["resident"] <= ROOM * alone["resident"] / 2 + 4 * rank["replicated"]


def test_a_head_of_its_own_next_to_a_tied_embedding_is_kept(two, tmp_path):
    folder, model = save(tmp_path, config_of("llama", tie_word_embeddings=True))
    tensors = {"model." + name: tensor.detach().contiguous() for name, tensor in model.checkpoint_tensors().items()}
    tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape)
    save_file(tensors, folder / "model.safetensors")
    job = job_of(folder)
    found, _ = two.run(job)
    assert_equal(found, run_job(job)[0])


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (config_of("gpt2"), 8, "--tensor-parallel-size 8 does not divide the 4 attention heads; 1, 2, 4 would"),
        (config_of("llama", intermediate_size=54), 4, "4 does not divide the 54 features; 1, 2, 3, 6, 9, 18, 27, 54"),
        (
            config_of("llama", num_attention_heads=12, hidden_size=96, num_key_value_heads=3), 2,
            "2 does not divide the 3 heads of keys and values; 1, 3 would",
        ),
    ],
)  # fmt: skip
def test_what_ranks_cannot_share_is_refused(config, size, message):
    with pytest.raises(ModelLoadError, match=message):
        load(job_of(config=config), size=size)
    load(job_of(config=config))


def test_a_shape_that_is_not_the_whole_one_is_refused(tmp_path):
    folder, model = save(tmp_path, config_of("llama"))
    tensors = {"model." + name: tensor.detach().contiguous() for name, tensor in model.checkpoint_tensors().items()}
    tensors["lm_head.weight"] = model.lm_head.weight.detach()
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, : LLAMA["intermediate_size"] // 2].contiguous()  # the part that a rank has
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"down_proj.weight' has shape \[32, 28\], expected \[32, 56\]"):
        load(job_of(folder), size=2)


def test_models_by_transformers_code_are_refused():
    config = SimpleNamespace(
        hf_config=GPT2, max_model_len=64, model_impl="transformers", architecture="XGLMForCausalLM", path=None,
        trust_remote_code=False,
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match=r"transformers' own code runs XGLMForCausalLM, .* to 1 instead of 2"):
        make_model(config, RankGroup(0, 2))


def save_adapter(folder, model):
    """Random matrices for every dense layer of a model, as peft saves them."""
    generator = torch.Generator().manual_seed(7)
    tensors, names = {}, set()
    for name, part in adaptable_parts(model).items():
        num_outputs, num_inputs = part.stored_shape
        full = f"base_model.model.{model.prefixes[0]}{name}"
        tensors[f"{full}.lora_A.weight"] = torch.randn((4, num_inputs), generator=generator) * num_inputs**-0.5
        tensors[f"{full}.lora_B.weight"] = torch.randn((num_outputs, 4), generator=generator)
        names.add(name.rpartition(".")[2])
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi3", "opt", "gpt-neox"])
def test_adapters_are_shared_as_their_layers_are(two, tmp_path, kind):
    job = job_of(config=config_of(kind))
    without, _ = run_job(job)
    model, _ = load_plain(job)
    job = job_of(config=config_of(kind), adapter=save_adapter(tmp_path, model))
    expected, _ = run_job(job)
    assert (expected - without)[:, 0].abs().max() > 0.1, "the adapter changed nothing"
    torch.testing.assert_close(expected[:, 1], without[:, 1], atol=1e-4, rtol=0)
    found, _ = two.run(job)
    assert_equal(found, expected)


WHOLE = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "options", "stored"),
    [
        ("llama", WHOLE | {"num_key_value_heads": 2}, "Q8_0"),
        ("llama", WHOLE | {"num_key_value_heads": 4}, "Q4_0"),
        ("gpt2", {"vocab_size": 96, "n_embd": 128, "n_inner": 512, "n_head": 4}, "Q8_0"),
    ],
)
def test_files_in_blocks_are_cut_between_blocks(two, tmp_path, kind, options, stored):
    gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)
    path = tmp_path / "m.gguf"
    gguf_files.write_model(path, make(kind, options), lambda name: stored if name.endswith("weight") else "F32")
    job = job_of(path)
    expected, alone = run_job(job)
    found, ranks = two.run(job)
    assert_equal(found, expected)
    replicated = 4 * ranks[0]["replicated"]
    assert all(0 < rank["read"] <= ROOM * alone["read"] / 2 + replicated for rank in ranks)
    assert all(rank["resident"] <= ROOM * alone["resident"] / 2 + replicated for rank in ranks)


def test_a_block_that_would_be_cut_is_refused(tmp_path):
    gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)
    path = tmp_path / "m.gguf"
    gguf_files.write_model(
        path, make("llama", WHOLE | {"intermediate_size": 96}), lambda name: "Q8_0" if "ffn_down" in name else "F32"
    )
    load(job_of(path))
    with pytest.raises(ModelLoadError, match=r"down_proj.weight' is stored in Q8_0 blocks of 32 inputs, which"):
        load(job_of(path), size=2)


def test_quantised_folders_are_refused_by_name(tmp_path):
    numbers = QuantizedTensor(tmp_path / "model.safetensors", "layers.0.mlp.up_proj.weight", (64, 64), "AWQ-4", 0, 2048)
    cut = Slices(0, (Part(32, 0, 64),))
    with pytest.raises(ModelLoadError, match=r"up_proj.weight' is quantised .* set tensor_parallel_size to 1"):
        check_cuts({"up": numbers}, {"up": cut})
