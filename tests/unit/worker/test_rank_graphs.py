"""Graphs of ranks that share a model: each computes its part of the head in them, and the first's go on to tokens.

Two ranks of this process, each in a thread, over memory that they share; graphs are on a fake recorder.
"""

import importlib.util
import queue
import threading
from dataclasses import replace

import naive_schedule
import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, load, make, prompts
from fake_streams import FakeRecorder, RaceDetector, StaticTorchBackend
from naive_schedule import NaiveEngine, Request
from test_cuda_graphs import make_graphs

from rustvllm import _core
from rustvllm.distributed.collective_time import CollectiveTime
from rustvllm.distributed.rank_group import ALONE, RankGroup
from rustvllm.exceptions import SchedulerStateError
from rustvllm.worker.graphs import sampling as sampling_module
from rustvllm.worker.graphs.sampling import make_sampling
from rustvllm.worker.step_output import ModelRunnerOutput

if importlib.util.find_spec("triton") is None:
    pytest.skip("what is chosen with is a module of kernels", allow_module_level=True)

SECONDS = 60.0
SIZES, MIXED_TOKENS = (1, 2, 4, 8), 64
ASKED = [
    {}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "top_k": 5, "seed": 2}, {},
    {"temperature": 0.5, "seed": 9},
]  # fmt: skip


def requests(asked):
    given = prompts(97, [3, 9, 17, 5, 30])
    return [Request(p, 10 + i, params, arrives=2 * i) for i, (p, params) in enumerate(zip(given, asked, strict=True))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make(*VARIANTS["llama"]).save_pretrained(folder)
    return folder


@pytest.fixture
def ranks(folder):
    """Models of two ranks that meet."""
    first = _core.RankMeeting(2)
    meetings = [first, _core.RankMeeting.join(first.fileno(), 1)]
    groups = [
        RankGroup(rank, 2, object(), meeting=meeting, timeout_seconds=SECONDS, time=CollectiveTime())
        for rank, meeting in enumerate(meetings)
    ]  # the meeting carries all of a CPU's tensors; the group says only that there is one
    yield [load(folder, group=group) for group in groups]
    first.give_up()


def make_engine(model):
    engine = NaiveEngine(model, attention_backend="torch")
    engine.runner.backend = StaticTorchBackend(model.kv_cache_spec, torch.float32)
    recorder = FakeRecorder()
    chooses = model.group.rank == 0
    engine.runner.graphs = make_graphs(engine, recorder, SIZES, MIXED_TOKENS, samples=True, chooses=chooses)
    return engine, recorder


def follow(engine, sampled):
    """Have an engine run steps as a rank that follows, which samples nothing: the tokens are the first rank's."""
    runner = engine.runner
    engine.capture_logits = False

    def take():
        runner.follow_step()
        return sampled.get(timeout=SECONDS)

    runner.sample_tokens = take


@pytest.mark.parametrize("asked", [[{}] * 5, ASKED])
def test_ranks_whose_graphs_have_the_head_give_the_tokens_of_one(folder, ranks, asked):
    alone = requests(asked)
    NaiveEngine(load(folder), attention_backend="torch").run(alone)
    engines = [make_engine(model) for model in ranks]
    (first, recorder), (second, other_recorder) = engines
    sampled, ended = queue.SimpleQueue(), []
    sample, sampler, after = first.runner.sample_tokens, first.runner.sampler.sample, []

    def give():
        output = sample()
        sampled.put(output)
        return output

    first.runner.sample_tokens = give
    first.runner.sampler.sample = lambda *arguments: after.append(1) or sampler(*arguments)
    follow(second, sampled)
    thread = threading.Thread(target=lambda: ended.append(second.run(requests(asked))), daemon=True)
    thread.start()
    shared = first.run(requests(asked))
    thread.join(SECONDS)
    assert [r.output for r in shared] == [r.output for r in alone]
    assert [r.output for r in ended[0]] == [r.output for r in alone]
    num_replays = [sum(graph.num_replays for graph in each.graphs) for each in (recorder, other_recorder)]
    assert num_replays[0] == num_replays[1] == len(first.steps), "each step is a replay on both"
    assert any(0 < s.num_sampled < s.num_reqs or s.max_num_scheduled_tokens > 1 for s in first.steps)
    needs_more = any("top_k" in each for each in asked)
    assert bool(after) == needs_more, "the graphs of the first rank choose"
    memory = [engine.runner.graphs._sampling._logits.nbytes for engine, _ in engines]
    assert memory[0] > memory[1] == 0


@pytest.mark.parametrize(("rank", "chooses"), [(0, True), (1, False)])
def test_the_first_rank_alone_chooses(folder, monkeypatch, rank, chooses):
    monkeypatch.setattr(sampling_module, "runs_fused_on", lambda device: True)
    model = load(folder)
    model.group = replace(ALONE, rank=rank, size=2)
    made = make_sampling(model, lambda rows: None, torch.float32, torch.device("cpu"), 4, 2)
    assert made is not None
    assert (made._choose is not None) == chooses


def test_a_rank_that_follows_waits_for_nothing_and_keeps_what_is_shared(folder, monkeypatch):
    """On a device that runs by itself the next step is launched at once; where −1 stands, it finds the first's ids."""
    detector = RaceDetector()
    monkeypatch.setattr(naive_schedule, "make_streams", lambda device: detector.streams)
    engine = NaiveEngine(load(folder), attention_backend="torch")
    runner, shared = engine.runner, []
    runner.last_token_ids = torch.zeros(runner.input_batch.block_table.shape[0], dtype=torch.int32)
    runner.share_ids = lambda ids: shared.append(ids.shape[0]) or ids.fill_(60 + len(shared))
    runner.discard_step = lambda: pytest.fail("which waits for the device")
    engine.capture_logits = False

    def take():
        rows = runner._executed.rows
        runner.follow_step()
        assert runner.last_token_ids[rows.tolist()].tolist() == [60 + len(shared)] * rows.size
        return ModelRunnerOutput(np.full((rows.size, 1), 60 + len(shared), np.int32))

    runner.sample_tokens = take
    with detector:
        engine.run([Request(prompt, 4, arrives=i) for i, prompt in enumerate(prompts(97, [3, 9, 17]))])
    assert shared == [step.num_sampled for step in engine.steps if step.num_sampled]
    assert detector.races == []
    assert detector.num_accesses["inputs"] > 10
    with pytest.raises(SchedulerStateError):
        runner.follow_step()


def test_no_rank_waits_for_the_ids_of_a_step_that_failed(folder):
    engine = NaiveEngine(load(folder), attention_backend="torch")
    runner, shared = engine.runner, []
    runner.last_token_ids = torch.zeros(runner.input_batch.block_table.shape[0], dtype=torch.int32)
    runner.share_ids = lambda ids: shared.append(ids.tolist()) or ids
    [request] = requests([{}] * 5)[:1]
    engine.admit([request])
    runner.sample_tokens = lambda: pytest.fail("on purpose")
    with pytest.raises(pytest.fail.Exception, match="on purpose"):
        engine.step()
    assert shared == []
    runner.give_awaited()
    assert shared == [[0]]
    runner.give_awaited()
    assert shared == [[0]], "once"
