"""What a graph does after the model: the head, and tokens for each request that asks for no more than that.

Greedy requests and those that are drawn by a temperature alone get their tokens there, and of drafts those are kept
that are right (``verify``). The logits stay where the graph leaves them, so a step whose requests ask for more
(filters, penalties, masks, log-probabilities) is sampled from those after it, and what the graph chose is written over.
Where several ranks share the head, the graphs of all compute it, and those of the first go on to tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rustvllm.layers.fused import runs_fused_on

if TYPE_CHECKING:
    from rustvllm.kernels.draw import StaticDraws
    from rustvllm.models.interface import CausalLM

RowParameters = Callable[[npt.NDArray[np.int32]], tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]
"""Temperatures and seeds of the requests in some persistent rows."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step's forward pass left on the device; all of it lasts until the next step.

    Attributes:
        hidden: ``[num_tokens, hidden_size]``; None where a graph went on from there.
        logits: Of a graph that went on, ``[n, vocab_size]``, of each token or each sample.
        sampled: Then int32 ``[num_sampled, c]``, negative where there is none: of requests that ask for no more than a
            temperature. It lasts until the step's set of buffers is used again.
        is_of_samples: Whether the logits are of the step's samples, in their order; else of its tokens.
        is_of_logits: Whether the logits are those that the step asks for, of drafts, too, where there are some.
    """

    hidden: Tensor | None
    logits: Tensor | None = None
    sampled: Tensor | None = None
    is_of_samples: bool = False
    is_of_logits: bool = False


class GraphSampling:
    """See the module.

    Args:
        max_rows: Of a graph.
        vocab_size: Of the model.
        dtype: Of its logits.
        device: Where all lies.
        num_sets: Of step buffers.
        parameters: Of requests.
        choose: See ``kernels.draw.choose``; None: another rank does.
        verify: See ``kernels.verify.verify``.

    Attributes:
        sampled: int32 ``[num_sets, max_rows]``: what was chosen in the step of each set of buffers. A set is used again
            only when the host has what its last step sampled.
        drawn: int32 ``[1, max_rows]``: what was chosen behind each token of a step with drafts.
        counters: int32 ``[max_rows]``, of ``choose``.
        verify: As given.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_sets: int,
        parameters: RowParameters,
        choose: Callable[[Tensor, StaticDraws], None] | None,
        verify: Callable[..., None],
    ) -> None:
        self.sampled = torch.zeros((num_sets, max_rows), dtype=torch.int32, device=device)
        self.drawn = torch.zeros((1, max_rows), dtype=torch.int32, device=device)
        self.counters = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._parameters = parameters
        self._logits = torch.zeros((0 if choose is None else max_rows, vocab_size), dtype=dtype, device=device)
        self._choose = choose
        self.verify = verify

    @property
    def chooses(self) -> bool:
        """Whether there are tokens, and not only logits that another rank takes."""
        return self._choose is not None

    @property
    def max_rows(self) -> int:
        """Rows that there is room for."""
        return self.sampled.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of all that stays where it is."""
        return self.sampled.nbytes + self.drawn.nbytes + self.counters.nbytes + self._logits.nbytes

    def parameters(self, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """What static inputs hold of the requests in some persistent rows: bits of other types as whole numbers.

        Returns:
            Temperatures ``[n]``, which are float32, and the halves of seeds ``[2, n]``, which are int64, the lower ones
            first.
        """
        temperatures, seeds = self._parameters(rows)
        return temperatures.view(np.int32), seeds.view(np.int32).reshape(rows.shape[0], 2).T

    def forward(self, model: CausalLM, hidden: Tensor, draws: StaticDraws) -> Tensor:
        """Logits of some hidden states ``[n, hidden_size]``, where they stay; the tokens go where ``draws`` says.

        Where another rank chooses, that one gets this one's part of the logits, and ``hidden`` alone is left here.
        """
        if self._choose is None:
            model.compute_logits(hidden)
            return hidden
        logits = self._logits[: hidden.shape[0]]
        computed = model.compute_logits(hidden, out=logits)
        if computed.dtype != logits.dtype:  # some models make theirs in float32; each graph keeps its own then
            logits = computed.contiguous()
        elif computed is not logits:
            logits.copy_(computed)
        self._choose(logits, draws)
        return logits


def make_sampling(
    model: CausalLM, parameters: RowParameters, dtype: torch.dtype, device: torch.device, max_rows: int, num_sets: int
) -> GraphSampling | None:
    """How the graphs of a model sample; the arguments are those of ``GraphSampling``.

    None where another stage computes the logits, and where no kernel chooses.
    """
    if not model.stage.is_last or not runs_fused_on(device):
        return None
    from rustvllm.kernels.draw import choose
    from rustvllm.kernels.verify import verify

    return GraphSampling(
        max_rows=max_rows,
        vocab_size=model.vocab_size,
        dtype=dtype,
        device=device,
        num_sets=num_sets,
        parameters=parameters,
        choose=choose if model.group.rank == 0 else None,
        verify=verify,
    )
