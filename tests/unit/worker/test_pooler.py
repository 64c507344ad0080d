"""Vectors of hidden states: against their definitions, and the same bits wherever a prompt is cut."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rustvllm.config.classifier import ClassifierConfig
from rustvllm.models.classifier import Score
from rustvllm.worker.pooler import NOT_NUMBERS, Pooler
from rustvllm.worker.step_output import POOLED

WIDTH = 24


class Step:
    """The arrays of a step, as the scheduler writes them."""

    def __init__(self, pieces):
        """``pieces``: row, tokens before the step, tokens in it, and tokens of the prompt."""
        counts = [count for _, _, count, _ in pieces]
        ends = np.cumsum(counts)
        done = [index for index, (_, before, count, total) in enumerate(pieces) if before + count == total]
        self.output = SimpleNamespace(
            num_reqs=len(pieces), total_num_scheduled_tokens=sum(counts), num_sampled=len(done), num_logits=len(done)
        )
        self.arrays = {
            "idx_mapping": np.array([row for row, *_ in pieces], np.int32),
            "query_start_loc": np.concatenate(([0], ends)).astype(np.int32),
            "num_computed_tokens": np.array([before for _, before, _, _ in pieces], np.int32),
            "positions": np.concatenate([np.arange(b, b + c) for _, b, c, _ in pieces]).astype(np.int32),
            "logits_indices": (ends[done] - 1).astype(np.int32),
            "sampled_rows": np.array([pieces[index][0] for index in done], np.int32),
        }

    def int32(self, name, length):
        return self.arrays[name][:length]

    def on_device(self, name, length):
        return torch.from_numpy(self.arrays[name][:length])


def run(kind, prompts, plan, dtype=torch.float32):
    """The vector of each row; ``plan`` says of each step which rows run how many tokens."""
    pooler, before, found = Pooler(kind, len(prompts)), [0] * len(prompts), {}
    for parts in plan:
        step = Step([(row, before[row], count, len(prompts[row])) for row, count in parts])
        hidden = torch.cat([prompts[row][before[row] : before[row] + count] for row, count in parts]).to(dtype)
        codes, vectors = pooler.pool(hidden, step.output, step)
        assert (codes.dtype, codes.shape) == (torch.int32, (step.output.num_sampled, 1))
        assert (vectors.dtype, vectors.shape) == (torch.float32, (step.output.num_sampled, WIDTH))
        for row, code, vector in zip(step.arrays["sampled_rows"].tolist(), codes[:, 0].tolist(), vectors, strict=True):
            found[row] = code, vector
        for row, count in parts:
            before[row] += count
    return found


def cut(lengths, rng):
    """A random plan: each step runs some tokens of some rows."""
    left, plan = dict(enumerate(lengths)), []
    while left:
        rows = [row for row in left if rng.random() < 0.7] or [next(iter(left))]
        parts = [(row, int(rng.integers(1, left[row] + 1))) for row in rows]
        for row, count in parts:
            left[row] -= count
        left = {row: rest for row, rest in left.items() if rest}
        plan.append(parts)
    return plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
def test_no_cut_changes_a_bit(kind, dtype):
    rng = np.random.default_rng(0)
    lengths = [1, 2, 7, 33, 150, 1000]
    prompts = [torch.from_numpy(rng.normal(0, 3, (n, WIDTH)).astype(np.float32)).to(dtype) for n in lengths]
    whole = run(kind, prompts, [list(enumerate(lengths))], dtype)
    for row, prompt in enumerate(prompts):
        exact = {"LAST": prompt[-1], "MEAN": prompt.double().mean(dim=0), "CLS": prompt[0]}[kind]
        code, vector = whole[row]
        assert code == POOLED
        torch.testing.assert_close(vector.double(), exact.double(), atol=1e-6, rtol=1e-6)
    for _ in range(40):
        pieces = run(kind, prompts, cut(lengths, rng), dtype)
        for row in whole:
            assert torch.equal(pieces[row][1].view(torch.int32), whole[row][1].view(torch.int32))


def test_a_sum_does_not_depend_on_the_order_of_its_numbers():
    rng = np.random.default_rng(1)
    prompt = torch.from_numpy(rng.normal(0, 1, (5000, WIDTH)).astype(np.float32))
    prompt[::7] *= 1000
    forwards, backwards = (run("MEAN", [p], [[(0, 5000)]])[0][1] for p in (prompt, prompt.flip(0)))
    assert torch.equal(forwards.view(torch.int32), backwards.view(torch.int32))
    plain = [np.cumsum(each.numpy(), axis=0)[-1] for each in (prompt, prompt.flip(0))]
    assert (plain[0] != plain[1]).any(), "these numbers would tell"


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
def test_a_row_starts_anew_with_its_next_prompt(kind):
    prompt = torch.ones(4, WIDTH)
    pooler = Pooler(kind, 1)
    for value in (1.0, 5.0, 2.0):
        for before in (0, 2) if value != 5.0 else (0,):  # the second one is preempted in its middle
            step = Step([(0, before, 2, 4)])
            _, vectors = pooler.pool(value * prompt[:2], step.output, step)
        if value != 5.0:
            assert torch.equal(vectors, value * prompt[:1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_states_that_are_not_numbers_are_told(kind, value):
    prompts = [torch.ones(3, WIDTH), torch.ones(3, WIDTH)]
    prompts[1][2, 5] = value
    found = run(kind, prompts, [[(0, 2), (1, 1)], [(0, 1), (1, 2)]])
    assert [found[row][0] for row in (0, 1)] == [POOLED, NOT_NUMBERS]


@pytest.mark.parametrize("num_labels", [1, 3, 50])
def test_numbers_of_labels_have_the_same_bits_in_any_batch(num_labels, monkeypatch):
    monkeypatch.setattr("rustvllm.models.classifier._NUMBERS_AT_ONCE", 40 * WIDTH)
    generator = torch.Generator().manual_seed(num_labels)
    score = Score(WIDTH, ClassifierConfig(num_labels=num_labels))
    score.weight.copy_(torch.randn(num_labels, WIDTH, generator=generator))
    states = torch.randn(30, WIDTH, generator=generator) * 50
    together = score(states)
    assert (together.dtype, together.shape) == (torch.float32, (30, num_labels))
    torch.testing.assert_close(together, (states.double() @ score.weight.double().T).float(), atol=1e-5, rtol=1e-6)
    for part in (states[:1], states[7:20], states[11:12]):
        begin = next(row for row in range(30) if torch.equal(states[row], part[0]))
        assert torch.equal(score(part), together[begin : begin + len(part)])
    order = torch.randperm(WIDTH, generator=generator)
    turned = Score(WIDTH, ClassifierConfig(num_labels=num_labels))
    turned.weight.copy_(score.weight[:, order])
    assert torch.equal(turned(states[:, order]), together), "whatever the order in which products are added"
    assert score(states[:0]).shape == (0, num_labels)


def test_a_classifier_gives_its_numbers_in_place_of_the_states():
    hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    hidden[4, 3] = float("inf")
    score = Score(WIDTH, ClassifierConfig(num_labels=2))
    score.weight.fill_(0.5)
    step = Step([(0, 0, 3, 3), (1, 0, 2, 2)])
    codes, numbers = Pooler("LAST", 2, score).pool(hidden, step.output, step)
    assert codes[:, 0].tolist() == [POOLED, NOT_NUMBERS]
    torch.testing.assert_close(numbers[0], 0.5 * hidden[2].sum().expand(2))
