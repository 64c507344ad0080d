"""Bitmasks against a loop over their bits."""

import numpy as np
import pytest
import torch

from rustvllm.sample.grammar import apply_bitmask, check_bitmask, rejected_rows


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97])
def test_only_what_its_bit_allows_stays(vocab_size):
    rng = np.random.default_rng(vocab_size)
    bitmask = rng.integers(-(2**31), 2**31, (5, -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    bitmask[1] = 0
    bitmask[2] = -1
    if vocab_size % 32:
        bitmask[3] = 0
        bitmask[3, -1] = np.int32(-1 << vocab_size % 32 if vocab_size % 32 < 31 else -(2**31))  # beyond the vocabulary
    before = bitmask.copy()
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size)).astype(np.float32))
    expected = logits.clone()
    rejected = []
    for row in range(5):
        allowed = [(int(bitmask[row, i // 32]) >> i % 32) & 1 for i in range(vocab_size)]
        rejected.append(not any(allowed))
        if any(allowed):
            expected[row, [i for i, bit in enumerate(allowed) if not bit]] = -torch.inf
    apply_bitmask(logits, torch.from_numpy(bitmask))
    assert torch.equal(logits, expected)
    assert rejected_rows(bitmask, vocab_size).tolist() == rejected
    assert rejected[1]
    assert not rejected[2]
    assert np.array_equal(bitmask, before)


@pytest.mark.parametrize(
    ("bitmask", "got"),
    [
        (np.zeros((2, 4), np.int32), r"int32 of shape \(2, 4\)"),
        (np.zeros((3, 3), np.int32), r"int32 of shape \(3, 3\)"),
        (np.zeros((3, 4), np.int64), r"int64 of shape \(3, 4\)"),
        (np.zeros(4, np.int32), r"int32 of shape \(4,\)"),
    ],
)
def test_another_shape_is_refused(bitmask, got):
    with pytest.raises(ValueError, match=rf"must be int32 of shape \(3, 4\), got {got}"):
        check_bitmask(bitmask, 3, 97)
