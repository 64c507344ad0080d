"""``PromptTargets``: the prompt tokens whose log-probabilities a step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rustvllm.models.interface import CausalLM
from rustvllm.sample.prompt_logprobs import GatheredPromptLogprobs, prompt_logprobs
from rustvllm.sample.prompt_tokens import NamedPromptTokens
from rustvllm.sample.scorer import Scorer
from rustvllm.worker.input_batch import InputBatch
from rustvllm.worker.step_buffers import StepBuffers

if TYPE_CHECKING:
    from rustvllm._core import SchedulerOutput


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """See the module.

    Attributes:
        indices: int32 ``[n]``, the step's token before each target, on the device.
        targets: int32 ``[n]``, the prompt token that follows each, on the device.
        num_rows: int32 ``[s]``, how many of them each request has that asks.
        num_logprobs: int64 ``[s]``, how many candidates each request wants.
        named: Further ones that requests name; None if none does.
    """

    indices: Tensor
    targets: Tensor
    num_rows: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int64]
    named: NamedPromptTokens | None

    @classmethod
    def stage(cls, output: SchedulerOutput, step: StepBuffers, batch: InputBatch) -> PromptTargets:
        """Those of a step; their tensors are on the device once the step has been sent."""
        num_tokens, num_reqs = output.num_prompt_logprobs, output.num_prompt_logprobs_reqs
        indices = step.int32("prompt_logprobs_indices", num_tokens)
        starts = step.int32("prompt_logprobs_indptr", num_reqs + 1)
        rows, num_rows = step.int32("prompt_logprobs_rows", num_reqs), np.diff(starts)
        first_places = step.arrays["positions"][indices[starts[:-1]]]
        return cls(
            step.stage(indices),
            step.stage(step.int32("prompt_logprobs_targets", num_tokens)),
            num_rows,
            batch.num_prompt_logprobs(rows),
            batch.extras.prompt_tokens.select(rows, first_places, num_rows, step.stage),
        )

    def score(self, hidden: Tensor, model: CausalLM, scorer: Scorer) -> GatheredPromptLogprobs:
        """Their log-probabilities.

        Args:
            hidden: ``[num_tokens, hidden_size]``, what the model computed of the step's tokens.
            model: Its head makes logits of these.
            scorer: Makes log-probabilities of the logits.
        """
        return prompt_logprobs(
            hidden[self.indices],
            model.compute_logits,
            model.vocab_size,
            self.targets,
            self.num_rows,
            self.num_logprobs,
            scorer.score,
            self.named,
        )
