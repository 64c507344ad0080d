"""Bitmasks against a loop over their bits."""

import numpy as np
import pytest
import torch

from rustvllm import _core
from rustvllm.sample.cpu_draw import CpuDraw
from rustvllm.sample.grammar import apply_bitmask
from rustvllm.sample.grammar_output import GrammarOutput
from rustvllm.sample.sampler import Sampler

THREADS = _core.CpuThreads(2)
MASKS = {"torch": apply_bitmask, "sampler": Sampler().mask, "core": Sampler(CpuDraw(THREADS)).mask}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97, 40_001])
def test_only_what_its_bit_allows_stays(vocab_size, mask):
    rng = np.random.default_rng(vocab_size)
    bitmask = rng.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    bitmask[2] = -1
    bitmask[1, : 1 + vocab_size // 64] = 0
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size)).astype(np.float32))
    expected = logits.clone()
    rows = [3, 0, 4]
    num_forbidden = 0
    for row, bits in zip(rows, bitmask, strict=True):
        forbidden = [i for i in range(vocab_size) if not (int(bits[i // 32]) >> i % 32) & 1]
        expected[row, forbidden] = -torch.inf
        num_forbidden += len(forbidden)
    mask(logits, torch.from_numpy(bitmask), torch.tensor(rows))
    assert torch.equal(logits, expected)
    assert num_forbidden


def test_wrong_arrays_are_refused_by_the_core():
    def mask(logits=None, rows=(0,), bitmask=None):
        logits = np.zeros((2, 40), np.float32) if logits is None else logits
        bitmask = np.zeros((len(rows), 2), np.int32) if bitmask is None else bitmask
        _core.mask_logits(THREADS, logits, np.array(rows, np.int64), bitmask)
        return logits

    assert np.isinf(mask()).sum() == 40
    assert not np.isinf(mask(rows=[])).any()
    for rows in ([2], [-1], [1, 1]):
        with pytest.raises(ValueError, match=f"row {rows[-1]} is given twice, or is not in 0 to 2"):
            mask(rows=rows)
    for bitmask in (np.zeros((1, 1), np.int32), np.zeros((2, 2), np.int32), np.zeros(2, np.int32)):
        with pytest.raises(ValueError, match=r"bitmask must have the shape \[1, 2\], got"):
            mask(bitmask=bitmask)
    with pytest.raises(TypeError, match="bitmask must be an array of int32"):
        mask(bitmask=np.zeros((1, 2), np.int64))
    with pytest.raises(TypeError, match="logits must be an array of float32"):
        mask(np.zeros((2, 40)))
    with pytest.raises(ValueError, match=r"C-contiguous and have the shape \[n, vocab_size\], got \[40\]"):
        mask(np.zeros(40, np.float32))
    with pytest.raises(ValueError, match="logits must be C-contiguous"):
        mask(np.zeros((40, 2), np.float32).T)
    read_only = np.zeros((2, 40), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="logits must be writable"):
        mask(read_only)


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
    output = GrammarOutput(bitmask, np.array(places, np.int32), np.array(verdicts, np.int32), np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=what):
        output.check(3, 97)
