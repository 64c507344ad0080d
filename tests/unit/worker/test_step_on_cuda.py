"""Steps on a GPU that is not there (``fake_cuda``): nothing waits for the device, and launches get what they read.

The engine, its scheduler and its batch are real; tensors on the device have no numbers, and every token that comes from
it is the same one.
"""

import contextlib
import functools
import importlib.util
import json
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not made for this platform", allow_module_level=True)

from fake_cuda import DEVICE, FakeCuda, on_fake_cuda, use_fake_cuda
from fake_streams import FakeRecorder
from torch._subclasses.fake_tensor import FakeTensor

from rustvllm import LLMEngine, PoolingParams, SamplingParams, StructuredOutputsParams
from rustvllm.attention.triton_backend import TritonAttentionPlan
from rustvllm.config.engine_args import EngineArgs
from rustvllm.lora import store as store_module
from rustvllm.lora.request import LoRARequest
from rustvllm.worker import worker as worker_module
from rustvllm.worker.step_output import POOLED

A = 66
"""The token of every sample: an "a" of the embedded model's tokenizer."""
PROMPTS = [[A, A, A], [A] * 30, [A, A]]
OPTIONS = {
    "device": "cpu", "dtype": "bfloat16", "async_scheduling": True, "num_gpu_blocks_override": 40, "max_num_seqs": 6,
    "max_num_batched_tokens": 24, "block_size": 16, "enable_prefix_caching": False,
}  # fmt: skip
SWAPPING = {
    "num_gpu_blocks_override": 16, "block_size": 4, "preemption_mode": "swap", "swap_space": 0.01, "max_model_len": 48,
}  # fmt: skip
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def cuda(monkeypatch_module):
    """The device."""
    device = FakeCuda(fetched=A)
    use_fake_cuda(monkeypatch_module, device)
    with device:
        yield device


@pytest.fixture(scope="module")
def engine(cuda, monkeypatch_module):
    """Makes an engine on it, of the embedded model's first two layers; what its steps do is watched."""
    load_model = worker_module.load_model

    def load_on_device(config, load, dtype, device, memory, packer, group, stage, changes):
        with torch.utils._python_dispatch._disable_current_modes():
            model = load_model(config, load, dtype, torch.device("cpu"), memory, None)
        model.h = torch.nn.ModuleList(list(model.h)[:2])
        model.kv_cache_spec = replace(model.kv_cache_spec, num_layers=2)
        return on_fake_cuda(model, cuda)

    monkeypatch_module.setattr(worker_module, "load_model", load_on_device)
    engines = []

    @functools.cache
    def make(*, graphs=False, **options):
        recorder = FakeRecorder() if graphs else None
        monkeypatch_module.setattr(worker_module, "make_graph_recorder", lambda device: recorder)
        options = DRAFTS | options if options.pop("drafts", False) else options
        if (pooling := options.pop("pooling", None)) is not None:
            options |= {"runner": "pooling", "pooler_config": {"pooling_type": pooling}}
        if options.pop("classifies", False):
            tokens = {"classifier_from_token": ["Ġno", "Ġyes"], "method": "no_post_processing"}
            options |= {"convert": "classify", "hf_overrides": tokens}
        engines.append(LLMEngine.from_engine_args(EngineArgs(**(OPTIONS | options))))
        runner = engines[-1].engine_core.core.executor._runner
        assert (runner.device, runner.backend.name) == (DEVICE, "triton")
        runner.execute_model = watched(cuda, runner.execute_model)
        runner.sample_tokens = watched(cuda, runner.sample_tokens)
        runner.recorder = recorder
        return engines[-1]

    yield make
    for each in engines:
        each.shutdown()


@pytest.fixture(autouse=True)
def forget(cuda):
    """What the test before did."""
    cuda.forget()


def watched(cuda, call):
    def watching(*args):
        with cuda.watch():
            return call(*args)

    return watching


def generate(engine, params, prompts=PROMPTS):
    """What came of the requests; none of them failed."""
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, params[index % len(params)])
    ended = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            if output.finished:
                ended.append(output.outputs[0])
    assert len(ended) == len(prompts)
    return ended


def greedy(**more):
    return SamplingParams(**({"temperature": 0, "max_tokens": 3, "ignore_eos": True} | more))


def drawn(**more):
    return greedy(temperature=0.8, seed=3, **more)


KINDS = {
    "greedy": [greedy()],
    "drawn": [drawn()],
    "greedy and drawn": [greedy(), drawn()],
    "top_k and top_p": [drawn(top_k=5), drawn(top_p=0.9), drawn()],
    "min_p and top_n_sigma": [drawn(min_p=0.1), drawn(top_n_sigma=1.5)],
    "penalties": [greedy(repetition_penalty=1.3), greedy(), drawn(presence_penalty=0.4, frequency_penalty=0.2)],
    "min_tokens": [greedy(min_tokens=3, stop_token_ids=[3, 4])],
    "logit_bias": [greedy(logit_bias={3: 2.0, 4: -1.0})],
    "allowed_token_ids": [greedy(allowed_token_ids=[A, 5])],
    "bad_words": [greedy(bad_words=["the", "once upon a", "a dog"]), greedy()],
    "logprobs": [greedy(logprobs=3), drawn(logprobs=0), greedy()],
    "prompt_logprobs": [greedy(prompt_logprobs=2), greedy()],
    "everything": [
        drawn(top_k=9, top_p=0.8, min_p=0.01, repetition_penalty=1.2, logit_bias={9: 1.0}, bad_words=["a dog"]),
        drawn(logprobs=2, min_tokens=2, presence_penalty=0.1),
        greedy(frequency_penalty=0.1, prompt_logprobs=0),
    ],
}


@pytest.mark.parametrize(
    ("kind", "graphs"), [(kind, False) for kind in KINDS] + [(kind, True) for kind in ("greedy", "drawn", "everything")]
)
def test_no_step_waits_for_the_device(engine, cuda, kind, graphs):
    ended = generate(engine(graphs=graphs), KINDS[kind])
    assert all(set(output.token_ids) == {A} for output in ended)
    assert "_attention_kernel" in cuda.launches, "steps were watched"
    assert ("_list_kernel" in cuda.launches) == graphs, "prompts ran in graphs"
    assert cuda.faults == []


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
def test_no_step_that_pools_waits_for_the_device(engine, cuda, monkeypatch, pooling):
    monkeypatch.setattr(cuda, "fetched", POOLED)
    ended = generate(engine(pooling=pooling, graphs=True), [PoolingParams()])
    assert all((output.token_ids, output.finish_reason) == ([], "stop") for output in ended)
    assert "_attention_kernel" in cuda.launches, "steps were watched"
    assert "_list_kernel" not in cuda.launches, "none ran in graphs, which have logits"
    assert cuda.faults == []


def test_no_step_that_classifies_waits_for_the_device(engine, cuda, monkeypatch):
    monkeypatch.setattr(cuda, "fetched", POOLED)
    ended = generate(engine(pooling="LAST", graphs=True, classifies=True), [PoolingParams()])
    assert all((output.token_ids, output.finish_reason) == ([], "stop") for output in ended)
    assert cuda.faults == []


class NotedSteps:
    """What each step does on the device, apart: in its graph, and next to it."""

    def __init__(self, cuda, monkeypatch, runner):
        self._cuda, self._outside = cuda, []
        self.in_graphs, self.steps = [], []  # names; the step's numbers, and names
        for graph in runner.recorder.graphs:
            monkeypatch.setattr(graph, "replay", self._apart(graph.replay))
        execute, sample = runner.execute_model, runner.sample_tokens

        def execute_noted(output):
            numbers = output.max_num_scheduled_tokens, output.num_logits == output.total_num_scheduled_tokens
            self.steps.append((*numbers, output.num_block_table_updates))
            self._outside.clear()
            execute(output)

        def sample_noted(*args):
            result = sample(*args)
            self.steps[-1] += ([*self._outside, *self._take()],)
            return result

        monkeypatch.setattr(runner, "execute_model", execute_noted)
        monkeypatch.setattr(runner, "sample_tokens", sample_noted)
        cuda.forget()

    def _take(self):
        seen = self._cuda.launches + self._cuda.operations
        self._cuda.forget()
        return seen

    def _apart(self, replay):
        def replay_apart():
            self._outside.extend(self._take())
            replay()
            self.in_graphs.append(self._take())

        return replay_apart


@pytest.mark.parametrize("kind", ["greedy", "drawn", "greedy and drawn", "top_k and top_p"])
def test_a_step_is_one_replay(engine, cuda, monkeypatch, kind):
    """What a graph holds costs one launch; in addition there is the copy of its inputs, and the list of new blocks."""
    running = engine(graphs=True)
    generate(running, KINDS[kind])  # captures
    noted = NotedSteps(cuda, monkeypatch, running.engine_core.core.executor._runner)
    generate(running, KINDS[kind])
    assert len(noted.in_graphs) == len(noted.steps), "each step is a replay"
    assert any("_draw_kernel" in names for names in noted.in_graphs), "graphs choose"
    mixed = [names for longest, _, _, names in noted.steps if longest > 1]
    assert mixed
    decodes = [names for longest, _, num_updates, names in noted.steps if longest == 1 and not num_updates]
    assert decodes
    if kind == "top_k and top_p":
        assert all("_truncate_kernel" in names for names in decodes + mixed), "the sampler does what graphs do not"
    else:
        assert decodes == [["copy_"]] * len(decodes)
        assert mixed == [["index_copy_", "copy_"]] * len(mixed), "the new blocks of prompts, and no sampler"


@pytest.mark.parametrize("kind", ["greedy", "drawn", "greedy and drawn", "top_k and top_p"])
def test_a_step_with_drafts_is_one_replay(engine, cuda, monkeypatch, kind):
    """It ends in what each request is given; nothing but the copy of its inputs is launched besides."""
    running = engine(graphs=True, drafts=True)
    generate(running, KINDS[kind])  # captures
    noted = NotedSteps(cuda, monkeypatch, running.engine_core.core.executor._runner)
    generate(running, KINDS[kind])
    assert len(noted.in_graphs) == len(noted.steps), "each step is a replay"
    assert any({"_draw_kernel", "_verify_kernel"} <= set(names) for names in noted.in_graphs), "graphs verify"
    with_drafts = [
        names for longest, all_sampled, updates, names in noted.steps if longest > 1 and all_sampled and not updates
    ]
    assert with_drafts
    if kind == "top_k and top_p":
        assert all({"_truncate_kernel", "_verify_kernel"} <= set(names) for names in with_drafts)
    else:
        assert with_drafts == [["copy_"]] * len(with_drafts)


def test_attention_sends_nothing_of_its_own(engine, cuda, monkeypatch):
    """Tiles of prompts are a part of the step, once it is known how many heads layers have."""
    running = engine()
    generate(running, KINDS["greedy"])
    cuda.forget()
    tiles = []
    send = TritonAttentionPlan._send
    monkeypatch.setattr(TritonAttentionPlan, "_send", lambda *args: tiles.append(1) or send(*args))
    generate(running, KINDS["greedy"])
    assert cuda.launches.count("_attention_kernel") > 6, "two layers of more than three steps"
    assert len(tiles) == 2, "once for each step with a piece of a prompt"
    assert "triton_backend.py" not in cuda.pinned_by
    assert cuda.faults == []


def test_its_device_becomes_the_current_one(engine, cuda):
    """A program that embeds the engine may have had another."""
    engine()
    assert set(cuda.made_current) == {DEVICE}


@pytest.mark.parametrize("mode", ["processed_logprobs"])
def test_no_mode_of_logprobs_waits(engine, cuda, mode):
    ended = generate(engine(logprobs_mode=mode), KINDS["logprobs"])
    assert ended[0].logprobs is not None
    assert cuda.faults == []


def test_no_swap_waits(engine, cuda):
    running = engine(**SWAPPING)
    generate(running, [greedy(max_tokens=12)], [[A] * n for n in (3, 16, 9, 12, 7, 14)])
    assert any(len(size) == 5 for size in cuda.sizes), "blocks were swapped out"
    assert cuda.faults == []


def test_no_mask_of_a_grammar_waits(engine, cuda):
    limited = greedy(structured_outputs=StructuredOutputsParams(regex="a+"))
    generate(engine(), [limited, greedy()])
    assert "bitwise_and" in cuda.operations, "bits of a mask were looked at"
    assert cuda.faults == []


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """The folder of an adapter for the first of the embedded model's two layers, with gains."""
    from safetensors.torch import save_file

    tensors, rank = {}, 4
    with torch.utils._python_dispatch._disable_current_modes():
        for module, num_inputs, num_outputs in (("attn.c_attn", 192, 576), ("mlp.c_proj", 768, 192)):
            name = f"base_model.model.transformer.h.0.{module}.lora_"
            tensors[f"{name}A.weight"] = torch.ones(rank, num_inputs)
            tensors[f"{name}B.weight"] = torch.ones(num_outputs, rank)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
    targets = r"transformer\.h\.0\..*(c_attn|mlp\.c_proj)"
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}), encoding="utf-8")
    read = store_module.read_adapter

    def read_for_real(*arguments):
        with torch.utils._python_dispatch._disable_current_modes():
            return read(*arguments)

    monkeypatch.setattr(store_module, "read_adapter", read_for_real)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda tensor: 64)
    return str(tmp_path)


@pytest.mark.parametrize(("graphs", "drafts"), [(False, False), (True, False), (True, True)])
def test_no_step_with_adapters_waits_and_each_runs_in_a_graph(engine, cuda, graphs, drafts, adapter, monkeypatch):
    running = engine(graphs=graphs, drafts=drafts, enable_lora=True, max_loras=2)
    runner = running.engine_core.core.executor._runner
    execute, steps = runner.execute_model, []
    monkeypatch.setattr(runner, "execute_model", lambda output: steps.append(output.num_reqs) or execute(output))
    replays = replays_of(runner)
    requests = [LoRARequest("one", 1, adapter), None, LoRARequest("two", 2, adapter)]
    for index, request in enumerate(requests):
        running.add_request(f"r{index}", {"prompt_token_ids": PROMPTS[index]}, greedy(), lora_request=request)
    while running.has_unfinished_requests():
        for output in running.step():
            assert output.error is None, output.error
    assert len(steps) > 2
    assert replays_of(runner) - replays == (len(steps) if graphs else 0)
    assert cuda.launches.count("_shrink_kernel") == cuda.launches.count("_expand_kernel") > 0
    layers = 8 if graphs else 2  # a graph has the launches of all dense layers of both blocks, and adapters are in two
    assert cuda.launches.count("_shrink_kernel") % layers == 0, "once for each, for both adapters"
    assert ("_list_kernel" in cuda.launches) == graphs, "prompts are in graphs, too"
    assert cuda.faults == []
    cuda.forget()
    generate(running, [greedy()])
    assert "_shrink_kernel" not in cuda.launches, "steps without adapters have graphs of their own"
    assert ("_list_kernel" in cuda.launches) == graphs
    assert cuda.faults == []


def replays_of(runner):
    """Of all graphs that an engine has captured."""
    return 0 if runner.recorder is None else sum(graph.num_replays for graph in runner.recorder.graphs)


def test_a_decode_with_adapters_is_one_replay(engine, cuda, adapter, monkeypatch):
    """In addition there is the copy of its inputs, and of what the table says of its adapters."""
    running = engine(graphs=True, drafts=False, enable_lora=True, max_loras=2)
    runner = running.engine_core.core.executor._runner

    def decodes():
        for index, name in enumerate(("three", "four")):
            request = LoRARequest(name, index + 3, adapter)
            running.add_request(f"r{index}", {"prompt_token_ids": [A, A]}, greedy(max_tokens=5), lora_request=request)
        while running.has_unfinished_requests():
            running.step()

    decodes()  # captures
    seen, in_graphs = [], []
    for graph in runner.recorder.graphs:
        replay = graph.replay

        def apart(replay=replay):
            outside = cuda.launches + cuda.operations
            cuda.forget()
            replay()
            in_graphs.append(list(cuda.launches))
            cuda.forget()
            cuda.operations += outside

        monkeypatch.setattr(graph, "replay", apart)
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_noted(output):
        cuda.forget()
        execute(output)
        seen.append((output.max_num_scheduled_tokens, output.num_block_table_updates, list(cuda.operations)))

    monkeypatch.setattr(runner, "execute_model", execute_noted)
    monkeypatch.setattr(runner, "sample_tokens", sample)
    decodes()
    assert all("_shrink_kernel" in names and "_expand_kernel" in names for names in in_graphs)
    of_decodes = [names for longest, num_updates, names in seen if longest == 1 and not num_updates]
    assert of_decodes
    assert of_decodes == [["copy_", "copy_", "index_select"]] * len(of_decodes)
    assert cuda.faults == []


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_draft_waits(engine, cuda, kind, graphs):
    ended = generate(engine(drafts=True, graphs=graphs), KINDS[kind])
    assert all(len(output.token_ids) == 3 for output in ended)
    assert "_verify_kernel" in cuda.launches, "drafts were compared"
    assert cuda.faults == []


class TestTheJudge:
    """It sees what it is there for."""

    @pytest.mark.parametrize(
        ("what", "do"),
        [
            ("blocks", lambda x: torch.arange(3).to(DEVICE)),
            ("blocks", lambda x: torch.arange(3).pin_memory().to(DEVICE)),
            ("not pinned", lambda x: torch.arange(3).to(DEVICE, non_blocking=True)),
            ("blocks", lambda x: torch.tensor([1, 2, 3], device=DEVICE)),
            ("blocks", lambda x: x.cpu()),
            ("waits", lambda x: x[0].item()),
            ("waits", lambda x: x.nonzero()),
            ("mask", lambda x: x[x > 0]),
            ("mixes", lambda x: x[torch.tensor([0, 1])]),
        ],
    )
    def test_a_fault(self, cuda, what, do):
        x = torch.zeros(4, device=DEVICE)
        with cuda.watch(), contextlib.suppress(RuntimeError):  # numbers that are not there
            do(x)
        assert what in cuda.faults[0]

    def test_what_is_right(self, cuda):
        with cuda.watch():
            x = torch.arange(3).pin_memory().to(DEVICE, non_blocking=True)
            x[x.clone()] = 1
            x.masked_fill_(x > 0, 2)
        assert cuda.faults == []
