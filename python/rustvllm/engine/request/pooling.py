"""Requests that end with a vector: what the model adds to one, and the numbers that its caller asked for."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rustvllm.config import ModelConfig
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import PoolingParams
from rustvllm.text.tokenizer import Tokenizer

_SHORTEST = 1e-12
"""Shorter vectors are divided by this instead of by their length, as torch's ``normalize`` does."""


@dataclass(kw_only=True)
class FilledPooling(PoolingParams):
    """Parameters with the model's defaults.

    Attributes:
        activation: What ``use_activation`` does: ``normalize``, ``softmax``, ``sigmoid`` or ``none``.
    """

    activation: str = "normalize"


def filled_params(params: PoolingParams, model: ModelConfig) -> FilledPooling:
    """A checked copy with the model's defaults.

    Raises:
        InvalidRequestError: Names the parameter, or says that the engine does something else.
    """
    pooler = model.pooler
    params.check()
    model.check_task(params.task or ("embed" if pooler is None else pooler.task))
    assert pooler is not None
    classifier = pooler.classifier
    if params.dimensions is not None and classifier is not None:
        raise InvalidRequestError(
            f"dimensions is for embeddings, but {model.served_model_name[0]} classifies: leave dimensions out",
            "dimensions",
        )
    if params.dimensions is not None:
        model.check_dimensions(params.dimensions, lambda text: InvalidRequestError(text, "dimensions"))
    filled = FilledPooling(**vars(params))
    filled.task = pooler.task
    if classifier is not None:
        filled.activation = classifier.activation
    filled.dimensions = pooler.dimensions if params.dimensions is None else params.dimensions
    filled.use_activation = pooler.use_activation if params.use_activation is None else params.use_activation
    return filled


def num_appended_tokens(tokenizer: Tokenizer) -> int:
    """How many special tokens a tokenizer puts behind a text."""
    own, whole = (list(tokenizer.encode_ids("a", special)) for special in (False, True))
    places = (first for first in range(len(whole)) if whole[first : first + len(own)] == own)
    return len(whole) - next(places, len(whole) - len(own)) - len(own)


def finished_vector(pooled: bytes, params: FilledPooling) -> npt.NDArray[np.float32]:
    """The vector of a request, float32 ``[dimensions]``: an embedding, or a number for each label.

    Args:
        pooled: float32 numbers, as the engine gave them.
        params: With the model's defaults.
    """
    vector = np.frombuffer(pooled, np.float32)[: params.dimensions]
    if not params.use_activation or params.activation == "none":
        return vector.copy()
    exact = vector.astype(np.float64)
    if params.activation == "softmax":
        powers = np.exp(exact - exact.max())
        exact = powers / powers.sum()
    elif params.activation == "sigmoid":
        exact = 0.5 * (1.0 + np.tanh(0.5 * exact))  # exp would overflow
    else:
        exact /= max(float(np.sqrt(exact @ exact)), _SHORTEST)
    return exact.astype(np.float32)
