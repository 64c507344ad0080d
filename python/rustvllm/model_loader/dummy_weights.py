"""Random weights for ``--load-format dummy``: diverse output without a checkpoint, the same for the same seed.

A rank of several has its part of the numbers that one process would have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rustvllm.layers.linear import Embedding
from rustvllm.layers.parallel import shard_of
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
    shards = {
        f"{path}.{name}" if path else name: shard
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if (shard := shard_of(module, name)) is not None
    }
    # By name: a list of them would keep the memory of those that are packed meanwhile.
    for name in [name for name, _ in model.named_parameters()]:
        parameter = model.get_parameter(name)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        shard, shape = shards.get(name), list(parameter.shape)
        if shard is not None:
            shape[shard.dim] = shard.whole
        noise = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        if name in embeddings:
            noise.mul_(0.05)
        elif len(shape) >= 2:  # a map, or a stack of them: [..., out_features, in_features]
            noise.mul_(1.5 * shape[-1] ** -0.5)
        else:  # vectors: a norm's weight is near one, a bias near zero
            noise.mul_(0.05).add_(1.0 if name.endswith("weight") else 0.0)
        parameter.copy_(noise if shard is None else shard.take(noise))
        filled(parameter)
