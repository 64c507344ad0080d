"""Streams against a race detector: what copies and steps must wait for, and that it is noticed when they do not."""

import importlib.util
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_streams import FakeEvent, FakeRecorder, RaceDetector, StaticTorchBackend

from rustvllm import LLMEngine, SamplingParams
from rustvllm.config.engine_args import EngineArgs
from rustvllm.exceptions import EngineDeadError
from rustvllm.worker import worker as worker_module
from rustvllm.worker.block_copier import BlockCopier
from rustvllm.worker.device_output import DeviceStepOutput
from rustvllm.worker.graphs.sampling import GraphSampling
from rustvllm.worker.step_buffers import StepBuffers
from rustvllm.worker.step_output import ModelRunnerOutput

SPEC = [("idx_mapping", "int32", (4,)), ("new_rows", "int32", (4,)), ("input_ids", "int32", (16,))]


@pytest.fixture(autouse=True, scope="module")
def plain_products():
    """By torch, which the detector sees; and whichever products are fastest now must not decide between equals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSTVLLM_LINEAR_KERNEL", "torch")
        yield


@pytest.fixture
def watch(monkeypatch):
    """Let a detector know what the host does to the memory it shares with the device."""

    def watch(detector):
        begin, get_output = StepBuffers.begin, DeviceStepOutput.get_output

        def begin_and_tell(self):
            detector.host_access(self._block, "the core writes a step", write=True)
            begin(self)

        def get_output_and_tell(self):
            output = get_output(self)
            detector.host_access(self.token_ids, "the core reads samples", write=False)
            return output

        monkeypatch.setattr(StepBuffers, "begin", begin_and_tell)
        monkeypatch.setattr(DeviceStepOutput, "get_output", get_output_and_tell)

    return watch


@pytest.fixture
def engine(monkeypatch, watch):
    """An engine as on a GPU, but for the device: streams and graphs are fakes."""
    engines = []

    def make(detector, recorder=None, **options):
        watch(detector)
        monkeypatch.setattr(worker_module, "make_streams", lambda device: detector.streams)
        monkeypatch.setattr(worker_module, "make_graph_recorder", lambda device: recorder)
        monkeypatch.setattr(
            worker_module,
            "make_attention_backend",
            lambda name, spec, dtype, device, num_threads, **_: StaticTorchBackend(spec, dtype),
        )
        engines.append(make_engine(**options))
        copier = engines[-1].engine_core.core.executor._runner.block_copier
        detector.host_memory = {cache.untyped_storage().data_ptr() for cache in copier.cpu_caches}
        return engines[-1]

    yield make
    for each in engines:
        each.shutdown()


def make_engine(**options):
    given = {"device": "cpu", "num_gpu_blocks_override": 40, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    return LLMEngine.from_engine_args(EngineArgs(**(given | options)))


PROMPTS = [[5, 6, 7], list(range(10, 45)), [9, 8], [30, 31, 32, 33], list(range(50, 70)), [4] * 9, [77, 3]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.7, max_tokens=7, ignore_eos=True),
]


SWAPPING = {
    "async_scheduling": True, "num_gpu_blocks_override": 16, "block_size": 4, "preemption_mode": "swap",
    "swap_space": 0.01, "max_model_len": 48,
}  # fmt: skip


def generate(engine, params=PARAMS):
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{index}", prompt, params[index % len(params)])
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = (output.outputs[0].finish_reason, list(output.outputs[0].token_ids))
    return outputs


@pytest.fixture(scope="module")
def expected():
    engine = make_engine(attention_backend="torch")
    outputs = generate(engine)
    engine.shutdown()
    assert all(reason == "length" for reason, _ in outputs.values())
    return outputs


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_nothing_races_and_the_tokens_are_the_same(engine, expected, overlap, graphs):
    detector, recorder = RaceDetector(), FakeRecorder() if graphs else None
    running = engine(detector, recorder, async_scheduling=overlap)
    with detector:
        outputs = generate(running)
    assert outputs == expected
    assert detector.races == []
    assert all(detector.num_accesses[name] > 10 for name in ("host", "compute", "inputs", "outputs"))
    if recorder is not None:
        assert sum(graph.num_replays for graph in recorder.graphs) > 10


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="what is chosen with is a module of kernels")
@pytest.mark.parametrize("has_own_rows", [True, False])
def test_tokens_that_graphs_choose_are_fetched_before_they_are_written_over(engine, monkeypatch, has_own_rows):
    """Each set of step buffers has a row for them; with one row for all, a replay would write what is being fetched."""
    from rustvllm.kernels import reference

    def make_sampling(model, parameters, dtype, device, max_rows, num_sets):
        made = GraphSampling(
            max_rows=max_rows, vocab_size=model.vocab_size, dtype=dtype, device=device, num_sets=num_sets,
            parameters=parameters, choose=reference.choose, verify=reference.verify,
        )  # fmt: skip
        if not has_own_rows:
            made.sampled = made.sampled[:1].expand(num_sets, -1)
        return made

    plain = make_engine(attention_backend="torch")
    expected = generate(plain, PARAMS[:2])
    plain.shutdown()
    monkeypatch.setattr(worker_module, "make_sampling", make_sampling)
    detector, recorder = RaceDetector(), FakeRecorder()
    running = engine(detector, recorder, async_scheduling=True)
    sampler = running.engine_core.core.executor._runner.sampler
    sample, num_sampled_after = sampler.sample, []
    sampler.sample = lambda *args: num_sampled_after.append(1) or sample(*args)
    with detector:
        outputs = generate(running, PARAMS[:2])
    decodes = [graph for graph in recorder.graphs if graph.result.shape[1] > 1000]
    assert sum(graph.num_replays for graph in decodes) > 5, "graphs ended in logits"
    assert len(num_sampled_after) < sum(graph.num_replays for graph in recorder.graphs)
    if has_own_rows:
        assert outputs == expected
        assert detector.races == []
    else:
        assert any("outputs" in race and "compute" in race for race in detector.races)


def test_swaps_race_with_nothing(engine, expected):
    detector = RaceDetector()
    running = engine(detector, FakeRecorder(), **SWAPPING)
    with detector:
        outputs = generate(running)
    assert outputs == expected
    assert detector.races == []
    assert detector.num_accesses["swaps"] > 10, "something was swapped"


@pytest.mark.parametrize(
    ("deaf", "what"),
    [
        ("compute", "compute: aten.* after inputs: aten.copy_"),
        ("outputs", "outputs: aten.copy_.default after compute: "),
        ("swaps", "swaps: aten.* after compute: "),
    ],
)
def test_a_stream_that_does_not_wait_is_noticed(engine, deaf, what):
    detector = RaceDetector(deaf={deaf})
    running = engine(detector, **SWAPPING)
    with detector:
        generate(running)
    assert any(re.match(what, race) for race in detector.races), detector.races[:5]


@pytest.mark.parametrize("deaf", [(), ("inputs",)])
def test_a_mirror_is_written_behind_who_read_it(deaf):
    detector = RaceDetector(deaf)
    step = StepBuffers(SPEC, device=torch.device("cpu"), streams=detector.streams)
    with detector:
        for _ in range(2):
            step.begin()
            step.send()
            step.on_device("input_ids", 16) + 1
            step.release(detector.streams.compute.record_event())
    assert bool(detector.races) == bool(deaf)


def test_a_set_arrives_in_one_copy_with_what_was_staged():
    detector = RaceDetector()
    step = StepBuffers(SPEC, device=torch.device("cpu"), streams=detector.streams)
    step.begin()
    step.arrays["idx_mapping"][:] = [3, 1, 2, 0]
    step.arrays["input_ids"][:] = np.arange(16)
    step.arrays["new_rows"][:] = 7
    staged = [step.stage(array) for array in (np.arange(5), np.ones((2, 3), np.float32), np.array([True, False]))]
    assert not step.on_device("input_ids", 16).any(), "nothing is there before it is sent"
    with detector:
        step.send()
    assert detector.num_accesses["inputs"] == 2 + 1, "one copy: it reads and writes, and its result is what it wrote"
    assert step.on_device("idx_mapping", 4).tolist() == [3, 1, 2, 0]
    assert step.on_device("input_ids", 3).tolist() == [0, 1, 2]
    assert [tensor.tolist() for tensor in staged] == [[0, 1, 2, 3, 4], [[1.0] * 3] * 2, [True, False]]
    assert [tensor.dtype for tensor in staged] == [torch.int64, torch.float32, torch.bool]
    with pytest.raises(RuntimeError, match="stage everything before"):
        step.stage(np.arange(3))
    step.arrays["idx_mapping"][:] = 9
    assert step.on_device("idx_mapping", 4).tolist() == [3, 1, 2, 0], "the mirror has memory of its own"


def test_what_does_not_fit_next_to_the_arrays_gets_memory_of_its_own():
    detector = RaceDetector()
    step = StepBuffers(SPEC, device=torch.device("cpu"), streams=detector.streams)
    step.begin()
    large = np.arange(100_000)
    staged, small = step.stage(large), step.stage(np.arange(3))
    step.send()
    assert torch.equal(staged, torch.from_numpy(large))
    assert small.tolist() == [0, 1, 2]


LISTS = ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy")


@pytest.mark.parametrize(("max_bytes_at_once", "staging_bytes"), [(1, 1), (1 << 20, 1 << 20), (5000, 12000)])
def test_swaps_during_the_forward_pass_equal_the_naive_loop(max_bytes_at_once, staging_bytes):
    layers, blocks, cpu_blocks, rest = 3, 12, 8, (4, 2, 3)
    rng = np.random.default_rng(max_bytes_at_once)
    detector = RaceDetector()
    caches = [torch.from_numpy(rng.standard_normal((2, blocks, *rest))) for _ in range(layers)]
    copier = BlockCopier(
        caches, cpu_blocks, streams=detector.streams, max_bytes_at_once=max_bytes_at_once, staging_bytes=staging_bytes
    )
    detector.host_memory = {cache.untyped_storage().data_ptr() for cache in copier.cpu_caches}
    mine = [cache.clone() for cache in caches]
    tier = [cache.clone() for cache in copier.cpu_caches]
    step = StepBuffers([(name, "int32", (16, 2)) for name in LISTS])
    with detector:
        for _ in range(30):
            gpu, cpu = rng.permutation(blocks), rng.permutation(cpu_blocks)
            lists = [
                list(zip(gpu, cpu[: rng.integers(0, 9)], strict=False)),
                list(zip(rng.permutation(cpu_blocks)[: rng.integers(0, 9)], rng.permutation(blocks), strict=False)),
                [(int(gpu[0]), int(gpu[1])), (int(gpu[0]), int(gpu[2]))][: rng.integers(0, 3)],
            ]
            for layer in range(layers):
                for block, cpu_block in lists[0]:
                    tier[layer][:, cpu_block] = mine[layer][:, block]
                for cpu_block, block in lists[1]:
                    mine[layer][:, block] = tier[layer][:, cpu_block]
                for source, target in lists[2]:
                    mine[layer][:, target] = mine[layer][:, source]
            for name, pairs in zip(LISTS, lists, strict=True):
                if pairs:
                    step.arrays[name][: len(pairs)] = pairs
            copier.execute(
                SimpleNamespace(num_swap_out=len(lists[0]), num_swap_in=len(lists[1]), num_copies=len(lists[2])), step
            )
            for array in step.arrays.values():
                array[:] = 77  # the core writes its next step here
            for cache in caches:  # the model computes, on the stream of its own
                cache.add_(1)
            for cache in mine:
                cache.add_(1)
        copier._settle()
    assert all(torch.equal(a, b) for a, b in zip(caches, mine, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(copier.cpu_caches, tier, strict=True))
    assert detector.races == []


def test_a_device_that_fails_says_so_when_its_step_is_awaited():
    class FailedEvent:
        def query(self):
            raise RuntimeError("an illegal memory access was encountered")

        synchronize = query

    rest = ModelRunnerOutput(np.empty((0, 1), np.int32))
    output = DeviceStepOutput(torch.zeros(1, dtype=torch.int32), (), FailedEvent(), lambda: rest)
    assert output.is_done(), "the step does not wait for it"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        output.get_output()


def test_a_failed_device_ends_its_requests_and_the_engine_goes_on(engine, expected, monkeypatch):
    detector = RaceDetector()
    running = engine(detector, async_scheduling=True)
    get_output, failures = DeviceStepOutput.get_output, [RuntimeError("an illegal memory access was encountered")]

    def fail_once(self):
        if failures:
            raise failures.pop()
        return get_output(self)

    monkeypatch.setattr(DeviceStepOutput, "get_output", fail_once)
    running.add_request("unlucky", [5, 6, 7], SamplingParams(max_tokens=5))
    outputs = []
    while running.has_unfinished_requests():
        outputs += running.step()
    assert "illegal memory access" in outputs[-1].error
    with detector:
        assert generate(running) == expected
    assert detector.races == []


@pytest.mark.parametrize("where", ["launch", "get_output"])
def test_a_device_that_failed_for_good_ends_the_engine_at_once(engine, monkeypatch, where):
    running = engine(RaceDetector(), async_scheduling=True)

    def fail(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    if where == "launch":
        monkeypatch.setattr(running.engine_core.core.executor._runner, "execute_model", fail)
    else:
        monkeypatch.setattr(FakeEvent, "synchronize", fail)
    with pytest.raises(EngineDeadError, match=r"the GPU failed \(CUDA error: an illegal memory access was enc"):
        generate(running)


def test_another_current_stream_is_not_what_steps_are_launched_in(engine, expected):
    """A program that embeds the engine may have made a stream of its own the current one."""
    detector = RaceDetector()
    running = engine(detector, FakeRecorder(), async_scheduling=True)
    detector._current = "swaps"
    with detector:
        assert generate(running) == expected
    assert detector.races == []
    assert detector._current == "swaps", "which it still is"
    assert detector.num_accesses["swaps"] == 0
