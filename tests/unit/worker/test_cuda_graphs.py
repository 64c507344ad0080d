"""Graphs on a fake recorder: their sizes, padding that touches no request, when they are captured."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, load, make, prompts
from fake_streams import FakeRecorder, StaticTorchBackend
from naive_schedule import NaiveEngine, Request

from rustvllm.attention.static_batch import StaticAttentionBackend
from rustvllm.attention.torch_backend import TorchAttentionBackend
from rustvllm.worker.graphs import mixed_graphs, step_graphs
from rustvllm.worker.graphs.context import GraphContext
from rustvllm.worker.graphs.decode_graphs import default_capture_sizes
from rustvllm.worker.graphs.mixed_graphs import MixedSize
from rustvllm.worker.graphs.recorder import CannotCaptureError, make_graph_recorder
from rustvllm.worker.graphs.sampling import GraphSampling
from rustvllm.worker.graphs.step_graphs import StepGraphs


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make(*VARIANTS[request.param]).save_pretrained(folder)
    return load(folder)


def make_graphs(engine, recorder, sizes, max_mixed_tokens, *, samples=False, chooses=True):
    runner = engine.runner
    sampling = None
    if samples:
        from rustvllm.kernels import draw, reference, verify

        sampling = GraphSampling(
            max_rows=max(*sizes, mixed_graphs.MAX_SAMPLED),
            vocab_size=runner.model.vocab_size,
            dtype=runner.model.embed_tokens.weight.dtype,
            device=runner.device,
            num_sets=2,
            parameters=runner.input_batch.draws,
            choose=(reference.choose if runner.device.type == "cpu" else draw.choose) if chooses else None,
            verify=reference.verify if runner.device.type == "cpu" else verify.verify,
        )
    context = GraphContext(
        recorder=recorder,
        model=runner.model,
        backend=runner.backend,
        kv_caches=runner.kv_caches,
        block_table=runner.input_batch.block_table,
        last_token_ids=runner.last_token_ids,
        block_size=engine.block_size,
        sampling=sampling,
    )
    return StepGraphs(sizes, max_mixed_tokens, context)


def make_engine(model, sizes=(1, 2, 4, 8), max_mixed_tokens=0, *, samples=False, **options):
    """A naive engine whose steps run in graphs: decodes, and with ``max_mixed_tokens`` others."""
    engine = NaiveEngine(model, attention_backend="torch", **options)
    engine.runner.backend = StaticTorchBackend(model.kv_cache_spec, torch.float32)
    recorder = FakeRecorder()
    engine.runner.graphs = make_graphs(engine, recorder, sizes, max_mixed_tokens, samples=samples)
    return engine, recorder


def outputs(engine, lengths, max_tokens=12):
    requests = [Request(p, max_tokens + i, arrives=i // 3) for i, p in enumerate(prompts(97, lengths))]
    engine.run(requests)
    return [r.output for r in requests], [r.logits for r in requests]


@pytest.mark.parametrize("sizes", [(8,), (1, 2, 4, 8), (3,)])
def test_steps_in_graphs_give_what_they_give_without(model, sizes):
    lengths = [3, 9, 17, 5, 6, 30, 2]
    expected_tokens, expected_logits = outputs(NaiveEngine(model, attention_backend="torch"), lengths)
    engine, recorder = make_engine(model, sizes)
    tokens, logits = outputs(engine, lengths)
    assert tokens == expected_tokens
    for got, expected in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(torch.stack(got), torch.stack(expected), atol=1e-4, rtol=1e-4)
    replays = sum(graph.num_replays for graph in recorder.graphs)
    decodes = [s for s in engine.steps if s.max_num_scheduled_tokens == 1]
    assert replays == sum(s.num_reqs <= max(sizes) for s in decodes)
    assert replays < len(engine.steps), "prompts run without"
    if sizes == (3,):
        assert any(s.num_reqs > 3 for s in decodes), "and so do batches beyond the largest"


ASKED = [
    {}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.5, "seed": -(2**61)},
    {"temperature": 0.8, "top_k": 5, "seed": 2}, {"temperature": 0.9, "seed": 8}, {"repetition_penalty": 1.5}, {},
    {"temperature": 0.7, "seed": 2**62 + 9}, {},
]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="what is chosen with is a module of kernels")
@pytest.mark.parametrize("max_mixed_tokens", [0, 64])
@pytest.mark.parametrize("asked", [ASKED[:3], ASKED[4:5] + ASKED[6:], ASKED])
def test_graphs_that_sample_give_what_steps_without_do(model, asked, max_mixed_tokens):
    def run(engine):
        lengths = [3, 9, 17, 5, 6, 30, 2, 4, 8]
        given = zip(prompts(97, lengths), asked, strict=False)
        requests = [Request(p, 10 + i, params, arrives=i // 3) for i, (p, params) in enumerate(given)]
        engine.run(requests)
        return [r.output for r in requests]

    expected = run(NaiveEngine(model, attention_backend="torch"))
    engine, recorder = make_engine(model, samples=True, max_mixed_tokens=max_mixed_tokens)
    sample, sampled_after = engine.runner.sampler.sample, []
    engine.runner.sampler.sample = lambda *args: sampled_after.append(1) or sample(*args)
    assert run(engine) == expected
    assert sum(graph.num_replays for graph in recorder.graphs) > 8
    has_more = any(set(each) - {"temperature", "seed"} for each in asked)
    without = [
        s.num_reqs > 8 if s.max_num_scheduled_tokens == 1 else s.total_num_scheduled_tokens > max_mixed_tokens
        for s in engine.steps
        if s.num_sampled
    ]
    assert (len(sampled_after) == sum(without)) != has_more, "the sampler is for what graphs do not do"
    assert bool(mixed_replays(recorder, engine)) == bool(max_mixed_tokens)
    decodes = [graph for graph in recorder.graphs if graph.result.shape[0] < 16]
    assert all(graph.result.shape[1] == 97 for graph in decodes), "they end in logits"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="what is chosen with is a module of kernels")
def test_mixed_graphs_of_many_requests_end_before_the_head(model, monkeypatch):
    def run(engine):
        requests = [Request(p, 4) for p in prompts(97, [2] * 9)]
        engine.run(requests)
        return [r.output for r in requests]

    expected = run(NaiveEngine(model, attention_backend="torch"))
    monkeypatch.setattr(mixed_graphs, "MAX_SAMPLED", 8)
    engine, recorder = make_engine(model, samples=True, max_mixed_tokens=64)
    sample, sampled_after = engine.runner.sampler.sample, []
    engine.runner.sampler.sample = lambda *args: sampled_after.append(1) or sample(*args)
    assert run(engine) == expected
    assert mixed_replays(recorder, engine) == 1
    assert len(sampled_after) == 1 + sum(s.num_reqs == 9 for s in engine.steps[1:]), "what had no graph"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="what is chosen with is a module of kernels")
def test_the_memory_of_what_they_leave_counts(model, monkeypatch):
    monkeypatch.setattr(step_graphs, "_measure", lambda device, sizes, capture: 1000)
    engine, _ = make_engine(model, samples=True)
    rows = mixed_graphs.MAX_SAMPLED
    logits, tokens, counters = rows * 97 * 4, 3 * rows * 4, rows * 4
    assert engine.runner.graphs.measure(torch.device("cpu")) == 1000 + logits + tokens + counters


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="what is chosen with is a module of kernels")
def test_a_decode_next_to_a_piece_of_one_token_is_sampled_alone(model):
    """A step of single tokens of which one is not the last of its prompt: its logits are not looked at."""

    def run(engine):
        requests = [Request(p, 5) for p in prompts(97, [1, 4])]
        engine.run(requests)
        return [r.output for r in requests]

    expected = run(NaiveEngine(model, attention_backend="torch"))
    engine, recorder = make_engine(model, samples=True, chunk=1)
    assert run(engine) == expected
    assert any(0 < s.num_sampled < s.num_reqs for s in engine.steps)
    assert sum(graph.num_replays for graph in recorder.graphs) == len([s for s in engine.steps if s.num_reqs])


def mixed_replays(recorder, engine):
    """Replays of mixed graphs: those with a hidden state for more rows than any graph of decodes has."""
    return sum(graph.num_replays for graph in recorder.graphs if graph.result.shape[0] >= 16)


@pytest.mark.parametrize("max_mixed_tokens", [32, 64])
def test_mixed_steps_in_graphs_give_what_they_give_without(model, max_mixed_tokens):
    lengths = [3, 9, 17, 5, 6, 30, 2, 40, 3]
    expected_tokens, expected_logits = outputs(NaiveEngine(model, attention_backend="torch"), lengths)
    engine, recorder = make_engine(model, max_mixed_tokens=max_mixed_tokens)
    tokens, logits = outputs(engine, lengths)
    assert tokens == expected_tokens
    for got, expected in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(torch.stack(got), torch.stack(expected), atol=1e-4, rtol=1e-4)
    mixed = [s for s in engine.steps if s.max_num_scheduled_tokens > 1]
    fitting = [s for s in mixed if s.total_num_scheduled_tokens <= max_mixed_tokens]
    assert any(s.num_reqs > 1 for s in fitting)
    assert any((s.num_reqs, s.total_num_scheduled_tokens) != (1, s.max_num_scheduled_tokens) for s in fitting)
    assert mixed_replays(recorder, engine) == len(fitting)
    assert (len(fitting) < len(mixed)) == (max_mixed_tokens == 32), "larger ones run without"


def test_padding_of_mixed_steps_touches_no_block(model):
    engine, recorder = make_engine(model, max_mixed_tokens=32, poison=True)
    requests = [Request(p, 6) for p in prompts(97, [5, 3])]
    engine.admit(requests)
    before = [cache.clone() for cache in engine.runner.kv_caches]
    engine.step()  # prompts
    assert mixed_replays(recorder, engine) == 1
    written = [block for r in requests for block in r.blocks]
    others = [block for block in range(before[0].shape[1]) if block not in written]
    for cache, old in zip(engine.runner.kv_caches, before, strict=True):
        assert torch.equal(cache[:, others].nan_to_num(7), old[:, others].nan_to_num(7))
        assert not cache[:, 0].any(), "the null block is zeros"
    assert not torch.isnan(torch.stack([r.logits[-1] for r in requests])).any()


def test_mixed_graphs_are_captured_ahead_for_few_requests(model):
    engine, recorder = make_engine(model, sizes=(1, 2), max_mixed_tokens=40)
    mixed = engine.runner.graphs.mixed
    rows = engine.runner.input_batch.block_table.shape[0] - 1
    assert mixed.sizes[0] == MixedSize(16, min(8, rows))
    assert mixed.sizes[-1] == MixedSize(40, rows)
    seen = []
    engine.runner.graphs.capture_all(lambda done, total: seen.append((done, total)))
    assert [graph.result.shape[0] for graph in recorder.graphs] == [40, 32, 16, 2, 1]
    assert seen == [(done, 5) for done in range(1, 6)]
    assert all(not cache.any() for cache in engine.runner.kv_caches), "captures write nothing"


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "longest", "size"),
    [
        (2, 1, 2, MixedSize(16, 8)), (16, 8, 9, MixedSize(16, 8)), (17, 1, 17, MixedSize(32, 8)),
        (40, 8, 3, MixedSize(40, 8)), (41, 1, 41, None), (1, 1, 1, None), (8, 8, 1, None),
    ],
)  # fmt: skip
def test_mixed_size_for(model, num_tokens, num_reqs, longest, size):
    engine, _ = make_engine(model, max_mixed_tokens=40)
    output = SimpleNamespace(total_num_scheduled_tokens=num_tokens, num_reqs=num_reqs, max_num_scheduled_tokens=longest)
    assert engine.runner.graphs.mixed.size_for(output) == size
    is_decode = longest == 1
    assert engine.runner.graphs.size_for(output) == (num_reqs if is_decode else 0 if size is None else size.num_tokens)


def test_padding_touches_no_block(model):
    engine, recorder = make_engine(model, (8,), poison=True)
    requests = [Request(p, 6) for p in prompts(97, [5, 3])]
    engine.admit(requests)
    engine.step()  # prompts
    before = [cache.clone() for cache in engine.runner.kv_caches]
    written = [r.blocks[len(r.tokens[:-1]) // engine.block_size] for r in requests]
    engine.step()
    assert [graph.num_replays for graph in recorder.graphs] == [1]
    others = [block for block in range(before[0].shape[1]) if block not in written]
    for cache, old in zip(engine.runner.kv_caches, before, strict=True):
        assert torch.equal(cache[:, others].nan_to_num(7), old[:, others].nan_to_num(7))
        assert not cache[:, 0].any(), "the null block is zeros"
    assert not torch.isnan(torch.stack([r.logits[-1] for r in requests])).any()


def test_capturing_in_the_middle_of_requests_disturbs_none(model):
    """A graph that is captured when it is first needed runs once over padding, not over the step before."""
    expected = outputs(NaiveEngine(model, attention_backend="torch"), [4, 7, 9, 12])[0]
    engine, recorder = make_engine(model)
    capture = recorder.capture

    def capture_and_look(forward):
        before = [cache.clone() for cache in engine.runner.kv_caches]
        graph = capture(forward)
        assert all(torch.equal(a, b) for a, b in zip(before, engine.runner.kv_caches, strict=True))
        return graph

    recorder.capture = capture_and_look
    assert outputs(engine, [4, 7, 9, 12])[0] == expected
    assert len(recorder.graphs) >= 2


def test_graphs_are_captured_ahead_the_largest_first(model):
    engine, recorder = make_engine(model)
    seen = []
    engine.runner.graphs.capture_all(lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [graph.result.shape[0] for graph in recorder.graphs] == [8, 4, 2, 1]
    engine.runner.graphs.capture_all()
    outputs(engine, [4, 7])
    assert len(recorder.graphs) == 4, "each once"


def test_a_step_whose_graph_cannot_be_captured_runs_without(model):
    engine, recorder = make_engine(model)
    tried = []

    def refuse(forward):
        tried.append(forward)
        raise CannotCaptureError("called a synchronizing CUDA operation")

    recorder.capture = refuse
    got, alone = Request([1, 2, 3], 6), Request([1, 2, 3], 6)
    engine.run([got])
    NaiveEngine(model).run([alone])
    assert got.output == alone.output
    assert len(tried) == 1, "the steps after it run without graphs"


@pytest.mark.parametrize(
    ("num_reqs", "longest", "size"), [(1, 1, 1), (2, 1, 4), (4, 1, 4), (5, 1, 8), (8, 1, 8), (9, 1, None), (2, 2, None)]
)
def test_size_for(model, num_reqs, longest, size):
    engine, _ = make_engine(model, (8, 1, 4))
    output = SimpleNamespace(num_reqs=num_reqs, max_num_scheduled_tokens=longest)
    assert engine.runner.graphs.decodes.size_for(output) == size


def test_default_sizes():
    assert default_capture_sizes(1) == (1,)
    assert default_capture_sizes(5) == (1, 2, 4, 5)
    assert default_capture_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert default_capture_sizes(256)[-2:] == (248, 256)
    assert default_capture_sizes(300)[-4:] == (256, 272, 288, 300)
    assert default_capture_sizes(4096)[-1] == 512


def test_who_can_be_captured(model):
    assert isinstance(StaticTorchBackend(model.kv_cache_spec, torch.float32), StaticAttentionBackend)
    assert not isinstance(TorchAttentionBackend(model.kv_cache_spec, torch.float32), StaticAttentionBackend)
    assert make_graph_recorder(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_graphs_give_what_steps_give_without(model, dtype, samples):
    on_gpu = model.to(device="cuda", dtype=dtype)
    try:
        lengths = [3, 9, 17, 5, 6, 30, 2]
        _, expected = outputs(NaiveEngine(on_gpu, block_size=16, attention_backend="triton"), lengths)
        engine = NaiveEngine(on_gpu, block_size=16, attention_backend="triton")
        runner = engine.runner
        recorder = make_graph_recorder(runner.device)
        runner.graphs = make_graphs(engine, recorder, (1, 2, 4, 8), 64, samples=samples)
        runner.graphs.capture_all()
        assert all(not cache.any() for cache in runner.kv_caches), "captures write nothing"
        _, logits = outputs(engine, lengths)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        for got, wanted in zip(logits, expected, strict=True):
            first = min(len(got), 3)  # later ones may follow another token where two are as likely
            torch.testing.assert_close(
                torch.stack(got[:first]), torch.stack(wanted[:first]), atol=tolerance, rtol=tolerance
            )
        assert np.isfinite(torch.stack(logits[0]).numpy()).all()
    finally:
        model.to(device="cpu", dtype=torch.float32)
