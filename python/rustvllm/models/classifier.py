"""Decoders without a head: for embeddings, or with the layer ``score``, which makes a number for each label."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from rustvllm.config.architectures import CLASSIFIER_ENDING
from rustvllm.config.classifier import ClassifierConfig
from rustvllm.exceptions import ModelLoadError
from rustvllm.models.interface import CausalLM

SCORE_NAME: Final = "score.weight"
"""The checkpoint's name of the layer's weight; it has no bias."""
_STEPS_PER_ONE: Final = 2.0**36
_NUMBERS_AT_ONCE: Final = 1 << 20
"""Products that are in memory at the same time: 8 MiB of float64."""


class Score(nn.Module):
    """A linear layer without bias in float32, whatever the model computes in; every rank has all of it.

    No bit of a result depends on which other rows there are: products are rounded to multiples of 2⁻³⁶, and sums of
    such numbers are exact in float64 up to 2¹⁷, in whatever order they are added.

    Args:
        width: Of the states.
        config: How many labels there are, and whether a checkpoint has the layer.
    """

    def __init__(self, width: int, config: ClassifierConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_labels, width, dtype=torch.float32), requires_grad=False)
        self._is_stored = not config.tokens

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See ``CausalLM.checkpoint_tensors``; none if the layer is made of rows of the head."""
        return {"weight": self.weight} if self._is_stored else {}

    def forward(self, states: Tensor) -> Tensor:
        """float32 ``[num_rows, width]`` → float32 ``[num_rows, num_labels]``."""
        if states.shape[0] == 0:  # no prompt ends in the step
            return states.new_empty(0, self.weight.shape[0])
        exact = states.double()[:, None, :]  # [num_rows, 1, width]
        at_once = max(1, _NUMBERS_AT_ONCE // states.numel())
        pieces = []
        for begin in range(0, self.weight.shape[0], at_once):
            rows = self.weight[begin : begin + at_once].double()
            pieces.append((exact * rows).mul_(_STEPS_PER_ONE).round_().sum(dim=-1))
        return torch.cat(pieces, dim=1).div_(_STEPS_PER_ONE).float()


class Classifier(CausalLM):
    """What :func:`classifying` makes of a decoder's class.

    Attributes:
        score: The layer behind the decoder.
        has_tied_head: Whether the head that it lacks would be the embedding.
    """

    score: Score
    has_tied_head: bool


@cache
def headless(model_class: type[CausalLM]) -> type[CausalLM]:
    """The class of a model for hidden states alone; neither a checkpoint's head nor its ``score`` is read."""

    class Headless(model_class):  # type: ignore[misc, valid-type]
        def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
            super().__init__(hf_config, max_model_len)
            self.drop_head()

        def is_ignored(self, name: str) -> bool:
            return name == SCORE_NAME or super().is_ignored(name)

    Headless.__name__ = model_class.__name__  # which messages say
    return Headless


@cache
def classifying(model_class: type[CausalLM], config: ClassifierConfig, width: int) -> type[Classifier]:
    """The class of a model that has ``score`` in place of its head.

    Args:
        model_class: Of the decoder.
        config: Of the layer.
        width: Of the decoder's states.
    """

    class SequenceClassifier(model_class, Classifier):  # type: ignore[misc, valid-type]
        def __init__(self, hf_config: Mapping[str, Any], max_model_len: int) -> None:
            super().__init__(hf_config, max_model_len)
            self.has_tied_head = self.is_tied
            self.drop_head()
            self.score = Score(width, config)

        def checkpoint_tensors(self) -> dict[str, Tensor]:
            stored = {f"score.{name}": tensor for name, tensor in self.score.checkpoint_tensors().items()}
            return super().checkpoint_tensors() | stored

        def check_filled(self) -> None:
            super().check_filled()
            if not config.tokens and not bool(self.score.weight.isfinite().all()):
                raise ModelLoadError(f"{SCORE_NAME} of this {type(self).__name__} has a number that is not finite")

    name = model_class.__name__
    base = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    SequenceClassifier.__name__ = name if base == name else base + CLASSIFIER_ENDING  # which messages say
    return SequenceClassifier
