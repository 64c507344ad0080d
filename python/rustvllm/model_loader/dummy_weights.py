"""Random weights for ``--load-format dummy``: diverse output without a checkpoint, the same for the same seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rustvllm.layers.linear import Embedding
from rustvllm.models.interface import CausalLM


def fill_dummy_weights(model: CausalLM, seed: int, filled: Callable[[Tensor], None] = lambda _: None) -> None:
    """Fill every parameter with random numbers that depend on the seed and the parameter's name only.

    The scales keep activations near one and let the blocks outweigh the embedding, so that what is generated is
    diverse: at the scales of a freshly initialised model it mostly repeats one token.

    Args:
        model: Whose parameters have memory.
        seed: Any integer.
        filled: Called with every parameter that has its values.
    """
    embeddings = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Embedding | nn.Embedding)
    }
    # By name: a list of them would keep the memory of those that are packed meanwhile.
    for name in [name for name, _ in model.named_parameters()]:
        parameter = model.get_parameter(name)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
        if name in embeddings:
            parameter.copy_(noise.mul_(0.05))
        elif parameter.dim() >= 2:  # a map, or a stack of them: [..., out_features, in_features]
            parameter.copy_(noise.mul_(1.5 * parameter.shape[-1] ** -0.5))
        else:  # vectors: a norm's weight is near one, a bias near zero
            parameter.copy_(noise.mul_(0.05).add_(1.0 if name.endswith("weight") else 0.0))
        filled(parameter)
