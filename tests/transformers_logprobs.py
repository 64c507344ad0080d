"""Log-probabilities by transformers: what the engine's are compared with."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def of_prompts(folder: Path) -> Callable[[list[int]], Tensor]:
    """A function of a Llama: ``[len(prompt) - 1, vocab_size]`` in float64, of each token of a prompt but the first."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float64)

    @torch.no_grad()
    def logprobs(prompt: list[int]) -> Tensor:
        return model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(dim=-1)

    return logprobs


def of_outputs(folder: Path, dtype: torch.dtype) -> Callable[[list[int], list[int]], Tensor]:
    """A function of a Llama: ``[len(output), vocab_size]``, at every place of an output that follows a prompt."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(str(folder), dtype=dtype)

    @torch.no_grad()
    def logprobs(prompt: list[int], output: list[int]) -> Tensor:
        ids = torch.tensor([prompt + output[:-1]])
        return model(ids, logits_to_keep=len(output)).logits[0].double().log_softmax(dim=-1)

    return logprobs
