"""Bitmasks against a loop over their bits."""

import numpy as np
import pytest
import torch

from rustvllm.sample.grammar import apply_bitmask
from rustvllm.sample.grammar_output import GrammarOutput


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97])
def test_only_what_its_bit_allows_stays(vocab_size):
    rng = np.random.default_rng(vocab_size)
    bitmask = rng.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    bitmask[2] = -1
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size)).astype(np.float32))
    expected = logits.clone()
    rows = [3, 0, 4]
    num_forbidden = 0
    for row, bits in zip(rows, bitmask, strict=True):
        forbidden = [i for i in range(vocab_size) if not (int(bits[i // 32]) >> i % 32) & 1]
        expected[row, forbidden] = -torch.inf
        num_forbidden += len(forbidden)
    apply_bitmask(logits, torch.from_numpy(bitmask), torch.tensor(rows))
    assert torch.equal(logits, expected)
    assert num_forbidden or vocab_size == 1


@pytest.mark.parametrize(
    ("bitmask", "places", "verdicts", "what"),
    [
        (
            np.zeros((2, 4), np.int32),
            [0, 2, 1],
            [0, 0, 0],
            r"bitmask .* int32 of shape \(3, 4\), got int32 .* \(2, 4\)",
        ),
        (np.zeros((3, 4), np.int64), [0, 2, 1], [0, 0, 0], r"bitmask .* int32 of shape \(3, 4\), got int64"),
        (np.zeros((3, 3), np.int32), [0, 2, 1], [0, 0, 0], r"bitmask .* got int32 of shape \(3, 3\)"),
        (
            np.zeros((3, 4), np.int32),
            [0, 2, 1],
            [0, 0],
            r"verdicts .* int32 of shape \(3,\), got int32 of shape \(2,\)",
        ),
        (np.zeros((3, 4), np.int32), [0, 3, 1], [0, 0, 0], r"places .* must be in 0 to 2, got \[0, 3, 1\]"),
        (np.zeros((3, 4), np.int32), [0, -1, 1], [0, 0, 0], r"places .* must be in 0 to 2"),
    ],
)
def test_what_does_not_fit_the_step_is_refused(bitmask, places, verdicts, what):
    output = GrammarOutput(bitmask, np.array(places, np.int32), np.array(verdicts, np.int32))
    with pytest.raises(ValueError, match=what):
        output.check(3, 97)
