"""How long a step waits for masks that are late."""

from types import SimpleNamespace

import numpy as np
import pytest

from rustvllm import _core
from rustvllm.config import SchedulerConfig
from rustvllm.engine.grammar_masks import GrammarMasks
from rustvllm.exceptions import ConfigError

OUTPUT = SimpleNamespace(num_structured_output_reqs=1)


class LateMasks:
    """Stands for the core: masks are never there, and there is one row to mask."""

    def __init__(self, *_: object, **__: object) -> None:
        self.waits: list[int] = []

    def wait_for_masks(self, _output: object, limit_ns: int) -> bool:
        self.waits.append(limit_ns)
        return False

    def take_masks(self, _output: object) -> int:
        return 1


def masks_of(monkeypatch: pytest.MonkeyPatch, wait_ms: float) -> GrammarMasks:
    monkeypatch.setattr(_core, "Grammars", LateMasks)
    scheduler = SchedulerConfig(max_num_seqs=3, grammar_mask_wait_ms=wait_ms)
    model = SimpleNamespace(vocab_size=40, tokenizer_path=None, eos_token_ids=(0,))
    speculation = SimpleNamespace(num_speculative_tokens=4)
    return GrammarMasks(SimpleNamespace(scheduler=scheduler, model=model, speculation=speculation), None)


@pytest.mark.parametrize(("wait_ms", "expected"), [(0, []), (2.5, [2_500_000])])
def test_a_step_waits_as_long_as_it_was_told_once_the_model_is_done(monkeypatch, wait_ms, expected):
    masks = masks_of(monkeypatch, wait_ms)
    left = iter([7000, 500, 0])
    found = masks.of_step(OUTPUT, lambda: next(left))
    assert masks._core.waits == [7000, 500, 0, *expected]
    assert found.bitmask.shape == (1, 2)
    assert masks._bitmask.shape == (3 * 5, 2), "behind each draft there is a token to be masked"
    assert {found.places.dtype, found.depths.dtype, found.verdicts.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize("wait_ms", [-1, 10_001, float("nan")])
def test_a_wait_outside_its_limits_is_refused(wait_ms):
    with pytest.raises(ConfigError, match="grammar_mask_wait_ms must be"):
        SchedulerConfig(grammar_mask_wait_ms=wait_ms)
