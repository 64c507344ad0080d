"""Requests for embeddings: what the model adds to one, and the vector that its caller asked for."""

import numpy as np
import numpy.typing as npt

from rustvllm.config import ModelConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import PoolingParams
from rustvllm.text.tokenizer import Tokenizer

_SHORTEST = 1e-12
"""Shorter vectors are divided by this instead of by their length, as torch's ``normalize`` does."""


def filled_params(params: PoolingParams, model: ModelConfig) -> PoolingParams:
    """A checked copy with the model's defaults.

    Raises:
        InvalidRequestError: Names the parameter, or says that the model makes no embeddings.
    """
    model.check_runner("pooling")
    pooler = model.pooler
    assert pooler is not None
    params.check()
    if params.dimensions is not None:
        model.check_dimensions(params.dimensions, lambda text: InvalidRequestError(text, "dimensions"))
    filled = params.clone()
    filled.dimensions = pooler.dimensions if params.dimensions is None else params.dimensions
    filled.use_activation = pooler.use_activation if params.use_activation is None else params.use_activation
    return filled


def num_appended_tokens(tokenizer: Tokenizer) -> int:
    """How many special tokens a tokenizer puts behind a text."""
    own, whole = (list(tokenizer.encode_ids("a", special)) for special in (False, True))
    places = (first for first in range(len(whole)) if whole[first : first + len(own)] == own)
    return len(whole) - next(places, len(whole) - len(own)) - len(own)


def finished_vector(pooled: bytes, params: PoolingParams) -> npt.NDArray[np.float32]:
    """The vector of a request, float32 ``[dimensions]``.

    Args:
        pooled: float32 numbers, as the engine gave them.
        params: With the model's defaults.
    """
    vector = np.frombuffer(pooled, np.float32)[: params.dimensions]
    if not params.use_activation:
        return vector.copy()
    exact = vector.astype(np.float64)
    return (exact / max(float(np.sqrt(exact @ exact)), _SHORTEST)).astype(np.float32)
