"""Named tokens at the places of prompts against a plain softmax in float64, however many rows are taken at a time."""

import numpy as np
import pytest
import torch

from rustvllm import _core
from rustvllm.sample import prompt_logprobs as module
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.prompt_logprobs import prompt_logprobs
from rustvllm.sample.prompt_tokens import RowPromptTokens
from rustvllm.sample.scorer import Scorer

VOCAB = 50


def named(start, rows):
    rows = np.array(rows, np.int32)
    return start, True, rows.shape[1], rows.tobytes()


@pytest.mark.parametrize("cpu_draw", [None, CpuDraw(_core.CpuThreads(2))], ids=["torch", "core"])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 256])
def test_they_come_behind_the_others_of_their_own_requests(monkeypatch, cpu_draw, max_rows):
    monkeypatch.setattr(module, "MAX_ROWS", max_rows)
    torch.manual_seed(1)
    head, hidden = torch.randn(8, VOCAB), torch.randn(9, 8)
    targets = torch.randint(0, VOCAB, (9,), dtype=torch.int32)
    num_rows, wanted = np.array([3, 2, 4], np.int32), np.array([2, 1, 0], np.int64)
    first_places = np.array([5, 0, 1], np.int32)
    tokens = RowPromptTokens()
    tokens.admit(7, named(6, [[3], [49]]))  # from its second place of the step on
    tokens.admit(9, named(0, [[0, 0], [1, 2], [3, -1], [-1, -1], [5, 6]]))
    chosen = tokens.select(np.array([7, 8, 9], np.int32), first_places, num_rows, torch.from_numpy)
    scorer = Scorer(cpu_draw=cpu_draw)
    arguments = (hidden, lambda rows: rows @ head, VOCAB, targets, num_rows, wanted, scorer.score)
    gathered, alone = prompt_logprobs(*arguments, chosen), prompt_logprobs(*arguments)
    got, same = gathered.arrays(gathered.tensors), alone.arrays(alone.tensors)
    assert [array.dtype for array in got.as_tuple()] == [np.int32, np.int32, np.float32, np.int32]
    assert got.num_columns.tolist() == [3 + 1, 2, 1 + 2]
    assert got.ranks.tolist() == same.ranks.tolist()
    plain = (hidden @ head).double().log_softmax(dim=-1).numpy()
    expected = [[-1], [3], [49], [], [], [1, 2], [3, -1], [-1, -1], [5, 6]]
    at = at_alone = 0
    for row, ids in enumerate(expected):
        width = [3, 2, 1][int(np.repeat(range(3), num_rows)[row])]
        for array, other in ((got.token_ids, same.token_ids), (got.logprobs, same.logprobs)):
            assert array[at : at + width].tolist() == other[at_alone : at_alone + width].tolist()
        values = [plain[row, token_id] if token_id >= 0 else -np.inf for token_id in ids]
        at, at_alone = at + width, at_alone + width
        assert got.token_ids[at : at + len(ids)].tolist() == ids
        assert got.logprobs[at : at + len(ids)].tolist() == pytest.approx(values, abs=1e-5)
        at += len(ids)
    assert at == got.token_ids.size == got.logprobs.size


def test_prompts_name_tokens_until_their_rows_are_left():
    tokens = RowPromptTokens()
    rows, places, counts = (np.array(values, np.int32) for values in ([3], [0], [2]))
    assert tokens.find(rows, places, counts) is None
    tokens.admit(3, None)
    assert tokens.find(rows, places, counts) is None
    tokens.admit(3, named(0, [[1], [2]]))
    found = tokens.find(rows, places, counts)
    assert (found.widths.tolist(), found.rows.tolist(), found.ids.tolist()) == ([1], [0, 1], [[1], [2]])
    # A table that does not fit its prompt does not fail the step.
    for first, inside in ((1, [0]), (2, []), (-1, [1])):
        found = tokens.find(rows, np.array([first], np.int32), counts)
        assert (found.widths.tolist(), found.rows.tolist()) == ([1], inside)
    tokens.drop(rows)
    assert tokens.find(rows, places, counts) is None
