"""Runs the head in a graph after the model, and samples tokens for requests with plain parameters.

Requests that are greedy, or that only set a temperature, get their tokens in the graph, and the drafts that are right
are kept (``verify``). The logits stay where the graph leaves them. A step whose requests need more (filters, penalties,
masks, log-probabilities) is sampled from those logits after the graph, and its tokens replace the graph's choice. If
several ranks share the head, the graphs of all ranks compute it, and only those of the first rank choose tokens.
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
"""Returns temperatures and seeds of the requests in some persistent rows."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step's forward pass left on the device; all of it is valid until the next step.

    Attributes:
        hidden: ``[num_tokens, hidden_size]``; None if the graph went on to logits.
        logits: ``[n, vocab_size]``, of each token or each sample, if the graph computed them.
        sampled: int32 ``[num_sampled, c]``, negative where there is no token: what the graph chose, which counts for
            plain parameters only. It is valid until the step's buffer set is used again.
        is_of_samples: Whether the logits belong to the step's samples, in their order; else to its tokens.
        is_of_logits: Whether these are exactly the rows of logits that the step needs, including those of drafts.
    """

    hidden: Tensor | None
    logits: Tensor | None = None
    sampled: Tensor | None = None
    is_of_samples: bool = False
    is_of_logits: bool = False


class GraphSampling:
    """See the module.

    Args:
        max_rows: The most rows of a graph.
        vocab_size: The model's vocabulary size.
        dtype: The dtype of its logits.
        device: The device of all tensors.
        num_sets: Number of step-buffer sets.
        parameters: Returns the requests' parameters.
        choose: See ``kernels.draw.choose``; None if another rank chooses.
        verify: See ``kernels.verify.verify``.

    Attributes:
        sampled: int32 ``[num_sets, max_rows]``: what was chosen in the step of each buffer set. A set is used again
            only when the host has the tokens of its last step.
        drawn: int32 ``[1, max_rows]``: what was chosen behind each token of a step with drafts.
        counters: int32 ``[max_rows]``, for ``choose``.
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
        """Whether this rank chooses tokens; else it only computes its part of the logits."""
        return self._choose is not None

    @property
    def max_rows(self) -> int:
        """The most rows that there is room for."""
        return self.sampled.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors with fixed addresses."""
        return self.sampled.nbytes + self.drawn.nbytes + self.counters.nbytes + self._logits.nbytes

    def parameters(self, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The parameters of the requests in some persistent rows, as int32 for the static inputs.

        Returns:
            Temperatures ``[n]``, the bits of float32, and seeds ``[2, n]``, the lower and then the upper halves of
            int64.
        """
        temperatures, seeds = self._parameters(rows)
        return temperatures.view(np.int32), seeds.view(np.int32).reshape(rows.shape[0], 2).T

    def forward(self, model: CausalLM, hidden: Tensor, draws: StaticDraws) -> Tensor:
        """Compute logits from hidden states ``[n, hidden_size]`` into fixed memory; ``draws`` says where tokens go.

        If another rank chooses, it gets this rank's part of the logits, and this rank returns ``hidden``.
        """
        if self._choose is None:
            model.compute_logits(hidden)
            return hidden
        logits = self._logits[: hidden.shape[0]]
        computed = model.compute_logits(hidden, out=logits)
        if computed.dtype != logits.dtype:  # some models compute logits in float32; each graph then keeps its own
            logits = computed.contiguous()
        elif computed is not logits:
            logits.copy_(computed)
        self._choose(logits, draws)
        return logits


def make_sampling(
    model: CausalLM, parameters: RowParameters, dtype: torch.dtype, device: torch.device, max_rows: int, num_sets: int
) -> GraphSampling | None:
    """Make the sampling of a model's graphs; the arguments are those of ``GraphSampling``.

    None if another stage computes the logits, or if no kernel can choose tokens.
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
