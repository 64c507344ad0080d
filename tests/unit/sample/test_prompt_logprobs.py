"""Log-probabilities of prompts against a plain softmax in float64, whatever number of rows is taken at a time."""

import numpy as np
import pytest
import torch

from rustvllm import _core
from rustvllm.logprobs import Logprob, PromptLogprobs
from rustvllm.sample import prompt_logprobs as module
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.prompt_logprobs import prompt_logprobs
from rustvllm.sample.scorer import Scorer

VOCAB = 50


@pytest.mark.parametrize("cpu_draw", [None, CpuDraw(_core.CpuThreads(2))], ids=["torch", "core"])
@pytest.mark.parametrize(("max_rows", "max_elements"), [(256, 1 << 24), (3, 1 << 24), (256, VOCAB * 2), (256, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_a_plain_softmax(monkeypatch, dtype, max_rows, max_elements, cpu_draw):
    monkeypatch.setattr(module, "MAX_ROWS", max_rows)
    monkeypatch.setattr(module, "MAX_ELEMENTS", max_elements)
    torch.manual_seed(1)
    head = torch.randn(8, VOCAB, dtype=torch.float32)
    hidden = torch.randn(9, 8).to(dtype)
    widest = 0

    def compute_logits(rows):
        nonlocal widest
        widest = max(widest, rows.shape[0])
        return (rows.float() @ head).to(dtype)

    targets = torch.randint(0, VOCAB, (9,), dtype=torch.int32)
    num_rows, wanted = np.array([4, 1, 4], np.int32), np.array([3, 0, VOCAB + 9], np.int64)
    gathered = prompt_logprobs(
        hidden, compute_logits, VOCAB, targets, num_rows, wanted, Scorer(cpu_draw=cpu_draw).score
    )
    got = gathered.arrays(gathered.tensors)
    assert widest <= max(1, min(max_rows, max_elements // VOCAB))
    assert [array.dtype for array in got.as_tuple()] == [np.int32, np.int32, np.float32, np.int32]
    assert all(array.flags.c_contiguous for array in got.as_tuple())
    assert got.num_columns.tolist() == [4, 1, 1 + VOCAB]
    plain = torch.cat([compute_logits(row[None]) for row in hidden]).double().log_softmax(dim=-1).numpy()
    at = 0
    for row, width in enumerate(np.repeat(got.num_columns, num_rows)):
        ids, values = got.token_ids[at : at + width], got.logprobs[at : at + width]
        own = int(targets[row])
        assert ids[0] == own
        assert values == pytest.approx(plain[row, ids], abs=1e-5)
        assert values[1:] == pytest.approx(np.sort(plain[row])[::-1][: width - 1], abs=1e-5)
        assert got.ranks[row] == 1 + int((plain[row] > plain[row, own]).sum())
        at += width
    assert at == got.token_ids.size == got.logprobs.size


def chunk(first, *rows):
    ids = np.array([[token_id for token_id, _ in candidates] for _, candidates in rows], np.int32)
    values = np.array([[value for _, value in candidates] for _, candidates in rows], np.float32)
    ranks = np.array([rank for rank, _ in rows], np.uint32)
    return first, ids.shape[1], ids.tobytes(), values.tobytes(), ranks.tobytes()


def test_places_are_like_a_list_of_dictionaries():
    places = PromptLogprobs(lambda token_id: bytes([token_id]))
    assert (len(places), list(places)) == (1, [None])
    places.extend(*chunk(1, (5, [(65, -3.0), (66, -0.5)]), (1, [(66, -0.25), (66, -0.25)])))
    places.extend(*chunk(3, (2, [(200, -1.0), (-1, 0.0)])))
    expected = [
        None,
        {65: Logprob(-3.0, 5, "A", b"A"), 66: Logprob(-0.5, 1, "B", b"B")},
        {66: Logprob(-0.25, 1, "B", b"B")},
        {200: Logprob(-1.0, 2, "\ufffd", b"\xc8")},
    ]
    assert places == expected
    assert places != expected[:3]
    assert places != "text"
    assert (len(places), places[-1], places[1:3], places[::-1]) == (4, expected[3], expected[1:3], expected[::-1])
    assert repr(places) == repr(expected)
    for index in (4, -5):
        with pytest.raises(IndexError, match="4 places"):
            places[index]
    with pytest.raises(ValueError, match="place 9"):
        places.extend(*chunk(9, (1, [(1, 0.0)])))


def test_without_a_tokenizer_there_is_no_text():
    places = PromptLogprobs()
    places.extend(*chunk(1, (1, [(7, -0.5)])))
    assert places[1] == {7: Logprob(-0.5, 1)}
