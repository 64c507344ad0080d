"""Captures that break as torch breaks them: the engine says so and its tokens are right, or it ends with the remedy."""

import pytest
import torch
from fake_capture import FakeTorchCuda
from fake_streams import RaceDetector, StaticTorchBackend

from rustvllm import LLMEngine, SamplingParams
from rustvllm.config.engine_args import EngineArgs
from rustvllm.exceptions import DeviceFailedError, EngineDeadError, ModelLoadError
from rustvllm.models.gpt2 import GPT2LMHeadModel
from rustvllm.worker import worker as worker_module
from rustvllm.worker.graphs import recorder as recorder_module
from rustvllm.worker.graphs.captures import Captures
from rustvllm.worker.graphs.memory import MemoryReading, graph_bytes
from rustvllm.worker.graphs.recorder import CannotCaptureError, CUDAGraphRecorder

PROMPTS = [[5, 6, 7], [30, 31, 32, 33, 34]]
OPTIONS = {"device": "cpu", "num_gpu_blocks_override": 40, "max_num_seqs": 2, "max_num_batched_tokens": 24}


@pytest.fixture
def cuda(monkeypatch):
    """What stands in for ``torch.cuda``; a captured forward pass is run anew by each replay."""

    class Rerun:
        def __init__(self, graph, hidden):
            self.result = hidden

    monkeypatch.setattr(recorder_module, "_CapturedGraph", Rerun)
    return FakeTorchCuda(monkeypatch)


@pytest.fixture
def engine(cuda, monkeypatch):
    """Makes an engine whose model does something in each forward pass; the recorder captures its graphs."""
    engines = []

    def make(on_forward, **options):
        plain = GPT2LMHeadModel.forward

        def forward(self, *args):
            on_forward()
            return plain(self, *args)

        monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)
        monkeypatch.setattr(worker_module, "make_streams", lambda device: RaceDetector().streams)
        monkeypatch.setattr(worker_module, "make_graph_recorder", CUDAGraphRecorder)
        monkeypatch.setattr(
            worker_module, "make_attention_backend", lambda name, spec, dtype, *_, **__: StaticTorchBackend(spec, dtype)
        )
        engines.append(LLMEngine.from_engine_args(EngineArgs(**(OPTIONS | options))))
        return engines[-1]

    yield make
    for each in engines:
        each.shutdown()


@pytest.fixture(scope="module")
def expected():
    engine = LLMEngine.from_engine_args(EngineArgs(**OPTIONS, attention_backend="torch"))
    tokens = generate(engine)
    engine.shutdown()
    return tokens


def run(engine):
    while engine.has_unfinished_requests():
        engine.step()


def generate(engine):
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{index}", prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_model_that_waits_is_not_captured_and_runs_right(engine, cuda, expected, mode, caplog):
    options = {} if mode == "eager" else {"cudagraph_capture_mode": "lazy"}
    with caplog.at_level("WARNING"):
        running = engine(cuda.wait, **options)
        assert generate(running) == expected
    assert "could not be captured (called a synchronizing CUDA operation)" in caplog.text
    assert cuda.num_captures == 0, "none was begun that had to fail"
    assert cuda.current is cuda.default
    torch.cuda.empty_cache()


def test_a_model_that_waits_leaves_the_measuring_of_memory_in_order(engine, cuda):
    running = engine(cuda.wait, cudagraph_capture_mode="lazy")
    worker = running.engine_core.core.executor._worker
    assert worker._graph_bytes() == 0
    assert cuda.current is cuda.default
    torch.cuda.empty_cache()


def test_sizes_that_were_asked_for_are_not_given_up_in_silence(engine, cuda):
    with pytest.raises(ModelLoadError, match=r"cannot run in a CUDA graph \(called a sync.*set enforce_eager"):
        engine(cuda.wait, cudagraph_capture_sizes=[1, 2])


def test_a_capture_that_breaks_ends_the_start_with_the_remedy(engine, cuda):
    with pytest.raises(ModelLoadError, match=r"could not be captured.*set enforce_eager"):
        engine(lambda: cuda.wait(only_in_captures=True))
    assert cuda.num_captures == 1
    assert cuda.current is cuda.default, "whose stream is the current one matters to who embeds the engine"


def test_a_capture_that_breaks_while_it_serves_ends_the_engine_at_once(engine, cuda):
    running = engine(lambda: cuda.wait(only_in_captures=True), cudagraph_capture_mode="lazy")
    running.add_request("r", PROMPTS[0], SamplingParams(temperature=0, max_tokens=6))
    with pytest.raises(EngineDeadError, match=r"could not be captured.*set enforce_eager"):
        run(running)
    assert cuda.num_captures == 1, "no second one is tried"
    assert cuda.current is cuda.default


def test_what_breaks_in_no_way_is_captured(cuda):
    calls = []

    def forward():
        calls.append(cuda._sync_mode)
        return torch.ones(2)

    graph = CUDAGraphRecorder(torch.device("cpu")).capture(forward)
    assert calls == [0, "error", 0], "once as it is, once to see whether it waits, once captured"
    assert graph.result.tolist() == [1, 1]
    assert (cuda.num_captures, cuda.underway) == (1, 0)


def test_the_refusal_names_what_was_done(cuda):
    with pytest.raises(CannotCaptureError, match="called a synchronizing"):
        CUDAGraphRecorder(torch.device("cpu")).capture(cuda.wait)
    assert cuda._sync_mode == 0


def test_memory_that_is_not_there_is_no_refusal(cuda):
    def forward():
        if cuda._sync_mode == "error":
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        CUDAGraphRecorder(torch.device("cpu")).capture(forward)


MiB = 1 << 20


@pytest.mark.parametrize(("in_capture", "error"), [(False, torch.OutOfMemoryError), (True, DeviceFailedError)])
def test_memory_that_a_late_capture_lacks_ends_the_engine_only_if_it_was_begun(cuda, in_capture, error):
    """Before a capture it is a step that finds no memory, which ends its own requests."""

    def forward():
        if cuda._is_capturing or not in_capture:
            raise torch.OutOfMemoryError("no 2 GiB")
        return torch.zeros(1)

    captures = Captures(CUDAGraphRecorder(torch.device("cpu")), lambda size: forward, str)
    with pytest.raises(error, match="no 2 GiB"):
        captures.of(4)
    assert captures.has_failed, "the next steps run without"
    assert cuda.num_captures == in_capture
    assert cuda.current is cuda.default


@pytest.mark.parametrize(
    ("readings", "num_graphs", "taken"),
    [
        ([(1000, 0, 0)], 5, 0),
        ([(1000, 100, 50), (900, 190, 60)], 1, 100),
        # The driver keeps 1 MiB of each; 2 MiB stay in use of the pool, which grew by a segment once.
        ([(1000, 0, 0), (900, 90, 10), (879, 110, 12), (878, 110, 14)], 11, 100 + 10 * 1 + 20),
        ([(1000, 0, 0), (900, 90, 10), (900, 90, 10), (900, 90, 10)], 51, 100),
        ([(500, 0, 0), (600, 0, 0)], 2, 0),
    ],
)
def test_what_graphs_take_is_told_from_the_first_few(readings, num_graphs, taken):
    read = [MemoryReading(*(MiB * number for number in reading)) for reading in readings]
    assert graph_bytes(read, num_graphs) == MiB * taken
