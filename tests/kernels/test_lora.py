"""Products of adapters, all of a step in two launches, against plain torch and, in whole models, against peft."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from checkpoints import assert_matches, load, make, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_schedule import NaiveEngine, Request
from ragged import DTYPES, TOLERANCES

from rustvllm.config.lora import LoRAConfig
from rustvllm.kernels import lora, reference
from rustvllm.lora.device_table import DeviceTable, TableDelta
from rustvllm.lora.store import AdapterStore
from rustvllm.lora.weights import ModuleDelta
from rustvllm.worker.dense_layers import make_batch_invariant
from rustvllm.worker.graphs.context import GraphContext
from rustvllm.worker.graphs.step_graphs import StepGraphs

LAYER, OTHER = 11, 12
"""Names of two layers; only the first is computed."""


class Layer:
    """A layer with parts, and adapters with matrices for some of them.

    Args:
        seed: Of the numbers.
        sizes: Outputs of each part.
        ranks: Of each adapter, by part; 0: it has none there.
        with_gains: Whether every second part of an adapter has gains.
    """

    def __init__(self, seed, sizes, num_inputs, ranks, dtype, device, *, with_gains=False):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        self.num_inputs, self.num_outputs = num_inputs, sum(sizes)
        firsts = np.cumsum([0, *sizes]).tolist()
        self.deltas, self.matrices = [], []
        for number, of_adapter in enumerate(ranks):
            deltas = []
            for part, rank in enumerate(of_adapter):
                if not rank:
                    continue
                place = type("Part", (), {"first": firsts[part], "num_outputs": sizes[part]})
                gains = 1 + 0.3 * normal(sizes[part]) if with_gains and (number + part) % 2 == 0 else None
                down = normal(rank, num_inputs) * num_inputs**-0.5
                deltas.append(ModuleDelta(place, down, normal(sizes[part], rank) * rank**-0.5, gains))
            rounded = [(delta.part.first, delta.up.to(dtype), delta.gains) for delta in deltas]
            parts = [(first, *(None if t is None else t.to(device) for t in of_part)) for first, *of_part in rounded]
            down = torch.cat([delta.down for delta in deltas]).to(dtype).to(device) if deltas else None
            self.deltas.append(deltas)
            self.matrices.append((down, parts))
        self.table = DeviceTable({OTHER: (1, 8), LAYER: (len(sizes), max(sizes))}, lambda a: torch.tensor(a).to(device))
        for number, deltas in enumerate(self.deltas, 1):
            self.table.put(number, {LAYER: TableDelta(deltas, dtype, device)} if deltas else {})
        self._stage = lambda array: torch.tensor(array).to(device)

    def add(self, x, out, bias, of_rows):
        """The layer's output of rows with these adapters (0: none)."""
        out = out.clone()
        rows = [(n, np.flatnonzero(np.array(of_rows) == n).astype(np.int32)) for n in sorted({*of_rows} - {0})]
        self.table.begin(rows, self._stage)
        self.table.add(LAYER, x, out, bias)
        return out

    def expected(self, x, out, bias, of_rows):
        out = out.clone()
        runs = [
            (np.flatnonzero(np.array(of_rows) == n).tolist(), *self.matrices[n - 1])
            for n in sorted({*of_rows} - {0})
            if self.deltas[n - 1]
        ]
        reference.add_adapters(x, out, bias, runs)
        return out


def inputs(seed, num_rows, layer, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn((num_rows, layer.num_inputs + 3), generator=generator)  # rows with a gap between them
    out, bias = torch.randn((num_rows + 1, layer.num_outputs), generator=generator).split([num_rows, 1])
    x = wide.to(dtype).to(device)[:, : layer.num_inputs]
    return x, out.to(dtype).to(device), bias[0].to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_many_adapters(dtype, device):
    rank = st.sampled_from([0, 1, 4, 16, 19, 40])

    @settings(max_examples=12, derandomize=True, deadline=None)
    @given(
        st.lists(st.sampled_from([3, 16, 21, 40]), min_size=1, max_size=3),
        st.sampled_from([5, 32, 70]),
        st.data(),
        st.booleans(),
        st.integers(0, 2**31),
    )
    def run(sizes, num_inputs, data, has_bias, seed):
        ranks = data.draw(st.lists(st.tuples(*[rank] * len(sizes)), min_size=1, max_size=4))
        layer = Layer(seed, sizes, num_inputs, ranks, dtype, device, with_gains=True)
        of_rows = data.draw(st.lists(st.integers(0, len(ranks)), min_size=1, max_size=40))
        x, out, bias = inputs(seed + 1, len(of_rows), layer, dtype, device)
        bias = bias if has_bias else None
        actual, expected = (f(x, out, bias, of_rows) for f in (layer.add, layer.expected))
        torch.testing.assert_close(actual, expected, **TOLERANCES[dtype])
        without = [row for row, number in enumerate(of_rows) if not number]
        assert torch.equal(actual[without], out[without]), "rows without an adapter are left alone"

    run()


@pytest.mark.usefixtures("rows_alike")
def test_a_row_has_the_same_bits_in_any_company(device):
    layer = Layer(3, [24, 8], 70, [(5, 2), (33, 0), (0, 16)], torch.float32, device, with_gains=True)
    of_rows = [1 + index % 3 for index in range(50)]
    x, out, bias = inputs(4, len(of_rows), layer, torch.float32, device)
    together = layer.add(x, out, bias, of_rows)
    assert not torch.equal(together, out)
    for row in (0, 1, 2, 31, 49):
        one = slice(row, row + 1)
        assert torch.equal(layer.add(x[one], out[one], bias, of_rows[one])[0], together[row])


def test_more_adapters_than_the_table_had_room_for_and_a_place_that_is_used_again(device):
    ranks = [(1 + number % 5,) for number in range(20)]
    layer = Layer(5, [16], 32, ranks, torch.float32, device)
    of_rows = list(range(1, 21))
    x, out, bias = inputs(6, 20, layer, torch.float32, device)
    before = layer.add(x, out, bias, of_rows)
    torch.testing.assert_close(before, layer.expected(x, out, bias, of_rows))
    layer.table.remove(3)
    layer.table.put(21, {LAYER: TableDelta(layer.deltas[4], torch.float32, device)})
    again = layer.add(x[:3], out[:3], bias, [1, 2, 21])
    assert torch.equal(again[:2], before[:2])
    torch.testing.assert_close(again[2:], layer.expected(x[:3], out[:3], bias, [1, 2, 5])[2:])
    with pytest.raises(KeyError):
        layer.add(x[:1], out[:1], bias, [3])


def test_a_tile_has_rows_of_one_adapter(device):
    del device
    runs = [(2, np.arange(0, 35, dtype=np.int32)), (0, np.array([40, 36], np.int32))]
    rows, tiles = lora.make_tiles(runs)
    assert rows.tolist() == [*range(35), 40, 36]
    assert tiles.tolist() == [[2, 0, 16], [2, 16, 16], [2, 32, 3], [0, 35, 2]]


@pytest.mark.parametrize(("kind", "sizes"), [("gpt2", {"n_layer": 2}), ("llama", {})], ids=["gpt2", "llama"])
def test_models_with_adapters_have_pefts_logits(kind, sizes, device, tmp_path):
    """Every kind of adapter next to others and to the model, pieces of prompts in one step with decodes."""
    pytest.importorskip("peft", reason="peft is not installed")
    from peft_adapters import make_adapter, options_of, with_adapter

    reference_model = make(kind, sizes)
    reference_model.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", device=str(device))
    store = AdapterStore(
        model, LoRAConfig(max_loras=3), torch.float32, None, batch_invariant=False,
        send=lambda array: torch.tensor(array).to(device),
    )  # fmt: skip
    names = ("query and value", "DoRA", "patterns")
    for number, name in enumerate(names, 1):
        make_adapter(reference_model, tmp_path / name, seed=number, **options_of(name, kind))
        store.add(number, name, tmp_path / name)
    requests = [
        Request(prompt, 2, {"adapter": index % 4}, arrives=index // 3)
        for index, prompt in enumerate(prompts(97, [1, 9, 15, 4, 12, 7, 5, 2]))
    ]
    engine = NaiveEngine(model, budget=24, chunk=8, block_size=8, attention_backend="triton", poison=True)
    engine.runner.adapters = store
    engine.run(requests)
    assert any(step.num_reqs > 3 and step.max_num_scheduled_tokens > 1 for step in engine.steps)
    adapted = [r for r in requests if r.params["adapter"]]
    differs = [bool((torch.stack(r.logits) - oracle(reference_model, r)).abs().max() > 1e-2) for r in adapted]
    assert all(differs), "the adapters change too little to be seen"
    clear = sum(assert_matches(reference_model, r) for r in requests if not r.params["adapter"])
    for number, name in enumerate(names, 1):
        with with_adapter(reference_model, tmp_path / name) as with_products:
            clear += sum(assert_matches(with_products, r) for r in requests if r.params["adapter"] == number)
    assert clear > 12, "margins too small to say anything"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of padding, which is computed from what memory held before
def test_steps_in_graphs_give_what_they_give_without(device, tmp_path):
    """Adapters come and go between replays, the table grows, and a step has more of them than there is room for."""
    pytest.importorskip("peft", reason="peft is not installed")
    from fake_streams import FakeRecorder
    from peft_adapters import make_adapter

    reference_model = make("llama", {"num_hidden_layers": 1})
    reference_model.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", device=str(device))
    store = AdapterStore(
        model, LoRAConfig(max_loras=2, max_lora_rank=33), torch.float32, None, batch_invariant=False,
        send=lambda array: torch.tensor(array).to(device),
    )  # fmt: skip
    folders = [tmp_path / str(number) for number in range(3)]
    for number, (folder, rank) in enumerate(zip(folders, (3, 16, 33), strict=True)):
        make_adapter(reference_model, folder, seed=number, r=rank, target_modules="all-linear")
    recorder = FakeRecorder()
    graphs = None

    def run(adapters, *, in_graphs):
        nonlocal graphs
        requests = [
            Request(prompt, 2, {"adapter": adapter}, arrives=index // 2)
            for index, (prompt, adapter) in enumerate(zip(prompts(97, [1, 9, 5]), adapters, strict=True))
        ]
        engine.runner.graphs = graphs if in_graphs else None
        engine.steps.clear()
        engine.run(requests)
        assert len(engine.steps) > 2
        assert any(step.max_num_scheduled_tokens > 1 for step in engine.steps)
        return [r.output for r in requests], torch.stack([each for r in requests for each in r.logits])

    engine = NaiveEngine(model, block_size=8, attention_backend="triton", max_num_seqs=3, poison=True)
    runner = engine.runner
    runner.adapters = store
    context = GraphContext(
        recorder=recorder,
        model=model,
        backend=runner.backend,
        kv_caches=runner.kv_caches,
        block_table=runner.input_batch.block_table,
        last_token_ids=None,
        block_size=8,
        make_adapters=store.make_static,
    )
    graphs = StepGraphs((3,), 16, context)
    seen = []

    def check(adapters, *, all_in_graphs=True):
        before = sum(graph.num_replays for graph in recorder.graphs)
        tokens, logits = run(adapters, in_graphs=True)
        replays = sum(graph.num_replays for graph in recorder.graphs) - before
        assert (replays == len(engine.steps)) == all_in_graphs
        assert replays
        expected = run(adapters, in_graphs=False)
        assert tokens == expected[0]
        torch.testing.assert_close(logits, expected[1], atol=1e-5, rtol=1e-5)
        seen.append(logits)

    store.add(1, "one", folders[0])
    store.add(2, "two", folders[1])
    check([1, 0, 2])
    store.remove(2)
    store.add(3, "three", folders[2])  # where the second was
    for number in range(4, 12):  # beyond the room that the table has at first
        store.add(number, str(number), folders[number % 3])
    check([3, 0, 11])
    check([1, 3, 11], all_in_graphs=False)
    assert all((a - b).abs().max() > 1e-2 for a, b in pairwise(seen)), "the adapters change too little to be seen"


def oracle(model, request):
    from checkpoints import oracle_logits

    return oracle_logits(model, request.tokens, len(request.prompt))


@pytest.mark.usefixtures("rows_alike")
def test_batch_invariant_logits_with_adapters_have_the_same_bits_in_any_company(device, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    from peft_adapters import make_adapter

    from rustvllm.attention.triton_backend import TritonAttentionBackend

    reference_model = make("llama", {"num_hidden_layers": 2})
    reference_model.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", device=str(device))
    store = AdapterStore(
        model, LoRAConfig(max_loras=2), torch.float32, None, batch_invariant=True,
        send=lambda array: torch.tensor(array).to(device),
    )  # fmt: skip
    make_batch_invariant(model)
    for number, rank in enumerate((3, 16), 1):
        make_adapter(reference_model, tmp_path / str(number), seed=number, r=rank, target_modules="all-linear")
        store.add(number, str(number), tmp_path / str(number))
    texts = prompts(97, [3, 12, 6])

    def run(requests, **options):
        engine = NaiveEngine(model, block_size=8, attention_backend="triton", **options)
        engine.runner.backend = TritonAttentionBackend(model.kv_cache_spec, torch.float32, device, batch_invariant=True)
        engine.runner.adapters = store
        engine.run(requests)
        return [torch.stack(request.logits) for request in requests]

    def request(index):
        return Request(texts[index], 2, {"adapter": index})

    together = run([request(index) for index in range(3)], chunk=7)
    for index, expected in enumerate(together):
        assert torch.equal(run([request(index)])[0], expected)
