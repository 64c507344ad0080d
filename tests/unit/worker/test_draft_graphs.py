"""Steps with drafts in graphs: which there are, and that they give what steps without do; on a fake recorder."""

import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("what is chosen with is a module of kernels", allow_module_level=True)

from fake_streams import FakeRecorder, StaticTorchBackend

from rustvllm import LLM, SamplingParams
from rustvllm.kernels import reference
from rustvllm.worker import worker as worker_module
from rustvllm.worker.graphs.draft_graphs import DraftSize, draft_sizes
from rustvllm.worker.graphs.sampling import GraphSampling

PROMPTS = [
    "Tom had a red ball. Tom had a red ball. Tom had a red",
    "the cat and the dog and the cat and the dog and the",
    "One day, a girl named Lily went to the park. One day, a girl named Lily",
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
GREEDY = {"temperature": 0}
DRAWN = {"temperature": 0.7, "seed": -(2**61)}
KINDS = {
    "greedy": [GREEDY],
    "greedy and drawn": [GREEDY, DRAWN, {"temperature": 0.4, "seed": 5}],
    "with what graphs do not do": [GREEDY, {"temperature": 0.8, "seed": 3, "top_k": 8, "logprobs": 2}],
    "penalties": [{"temperature": 0, "repetition_penalty": 1.02}, DRAWN],
}


def make(monkeypatch, *, graphs, **options):
    """An engine on the CPU whose steps run in graphs, or not."""
    recorder = FakeRecorder()
    if graphs:
        monkeypatch.setattr(worker_module, "make_graph_recorder", lambda device: recorder)
        monkeypatch.setattr(
            worker_module, "make_sampling",
            lambda model, parameters, dtype, device, max_rows, num_sets: GraphSampling(
                max_rows=max_rows, vocab_size=model.vocab_size, dtype=dtype, device=device, num_sets=num_sets,
                parameters=parameters, choose=reference.choose, verify=reference.verify,
            ),
        )  # fmt: skip
    monkeypatch.setattr(
        worker_module,
        "make_attention_backend",
        lambda name, spec, dtype, *rest, **more: StaticTorchBackend(spec, dtype),
    )
    config = {**DRAFTS, "adaptive": False}
    llm = LLM(
        max_model_len=128, num_gpu_blocks_override=129, max_num_seqs=4, speculative_config=config,
        enable_prefix_caching=False, **options,
    )  # fmt: skip
    monkeypatch.undo()
    return llm, recorder


def runner_of(llm):
    return llm.llm_engine.engine_core.core.executor._runner


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "overlapping"])
def pair(request):
    with pytest.MonkeyPatch.context() as monkeypatch:
        options = {"async_scheduling": request.param}
        yield make(monkeypatch, graphs=False, **options)[0], *make(monkeypatch, graphs=True, **options)


def answers(llm, kind):
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **KINDS[kind][i % len(KINDS[kind])]) for i in range(3)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_drafts_in_graphs_give_what_they_give_without(pair, kind, monkeypatch):
    plain, with_graphs, _ = pair
    expected = answers(plain, kind)
    drafts = runner_of(with_graphs).graphs.drafts
    sampler = runner_of(with_graphs).sampler
    ran, sampled_after = [], []
    run, sample = drafts.run, sampler.sample
    monkeypatch.setattr(drafts, "run", lambda staged, size, output: ran.append(size) or run(staged, size, output))
    monkeypatch.setattr(sampler, "sample", lambda *args: sampled_after.append(1) or sample(*args))
    stats = with_graphs.llm_engine.engine_core.core.scheduler.stats
    before = stats()
    assert answers(with_graphs, kind) == expected
    after = stats()
    num_steps, accepted, drafted = (
        after[name] - before[name] for name in ("num_steps", "num_accepted_tokens", "num_draft_tokens")
    )
    assert len(ran) > 5, "steps with drafts ran in their graphs"
    assert 0 < accepted < drafted
    if kind.startswith("greedy"):
        assert len(sampled_after) <= num_steps - len(ran), "those were not sampled once more"
    else:
        assert len(sampled_after) >= len(ran)


def test_it_leaves_the_newest_token_of_each_request(monkeypatch):
    """The step after it may be planned before the host knows them."""
    llm, _ = make(monkeypatch, graphs=True, async_scheduling=True)
    runner = runner_of(llm)
    drafts, seen = runner.graphs.drafts, []
    run = drafts.run

    def run_and_look(staged, size, output):
        result = run(staged, size, output)
        rows = runner.step_buffers[output.buffer_index].int32("idx_mapping", output.num_reqs)
        for row, given in zip(rows.tolist(), result.sampled.tolist(), strict=True):
            assert int(runner.last_token_ids[row]) == [token_id for token_id in given if token_id >= 0][-1]
            seen.append(len([token_id for token_id in given if token_id >= 0]))
        return result

    monkeypatch.setattr(drafts, "run", run_and_look)
    answers(llm, "greedy")
    assert max(seen) > 1


def test_sizes():
    assert draft_sizes(8, 0) == []
    assert draft_sizes(1, 1) == [DraftSize(1, 2)]
    assert draft_sizes(3, 4) == [
        DraftSize(1, 2), DraftSize(2, 2), DraftSize(1, 4), DraftSize(1, 5), DraftSize(3, 2), DraftSize(2, 4),
        DraftSize(2, 5), DraftSize(3, 4), DraftSize(3, 5),
    ]  # fmt: skip
    many = draft_sizes(1000, 63)
    assert {size.width for size in many} == {2, 4, 8, 32}
    assert max(size.num_reqs for size in many) == 64
    assert max(size.num_tokens for size in many) == 512
    assert many == sorted(many, key=lambda size: size.num_tokens)


@pytest.mark.parametrize(
    ("tokens", "num_logits", "size"),
    [
        ([2], 2, DraftSize(1, 2)), ([3, 1], 4, DraftSize(2, 4)), ([6, 6, 6], 18, DraftSize(4, 6)),
        ([1, 1], 2, None),  # no drafts
        ([4, 3], 4, None),  # a piece of a prompt
        ([7], 7, None),  # more than a graph has
        ([2, 2, 2, 2, 2], 10, None),  # more requests than there may be
        ([5, 1, 1, 1], 8, DraftSize(4, 6)), ([5, 1, 1], 7, DraftSize(4, 6)),
    ],
)  # fmt: skip
def test_size_for(pair, tokens, num_logits, size):
    output = SimpleNamespace(
        num_reqs=len(tokens), max_num_scheduled_tokens=max(tokens), total_num_scheduled_tokens=sum(tokens),
        num_logits=num_logits, num_prompt_logprobs=0,
    )  # fmt: skip
    graphs = runner_of(pair[1]).graphs.drafts
    assert graphs.size_for(output) == size
    output.num_prompt_logprobs = 1
    assert graphs.size_for(output) is None


def test_few_drafts_among_many_requests_are_not_padded_to_as_many_each(monkeypatch):
    config = {**DRAFTS, "num_speculative_tokens": 15, "adaptive": False}
    monkeypatch.setattr("test_draft_graphs.DRAFTS", config)
    llm, _ = make(monkeypatch, graphs=True)
    output = SimpleNamespace(
        num_reqs=4, max_num_scheduled_tokens=9, total_num_scheduled_tokens=12, num_logits=12, num_prompt_logprobs=0
    )
    assert runner_of(llm).graphs.drafts.size_for(output) is None


def test_all_are_captured_ahead_the_largest_first_and_write_nothing(monkeypatch):
    llm, recorder = make(monkeypatch, graphs=True)
    graphs, runner = runner_of(llm).graphs, runner_of(llm)
    assert len(recorder.graphs) == graphs.num_ahead()
    rows = [graph.result.shape[0] for graph in recorder.graphs]
    num_decodes, num_drafts = len(graphs.decodes.sizes), len(graphs.drafts.sizes)
    of_drafts = [size.num_tokens for size in reversed(graphs.drafts.sizes)]
    assert rows[-num_decodes - num_drafts : -num_decodes] == of_drafts
    assert all(not cache.any() for cache in runner.kv_caches)
