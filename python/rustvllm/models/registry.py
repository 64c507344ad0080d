"""Finds the class for an architecture name, in the rows of ``config/architectures``; imports its module when needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rustvllm.config.architectures import ARCHITECTURES, SUPPORTED_ARCHITECTURES
from rustvllm.distributed.rank_group import ALONE, RankGroup
from rustvllm.distributed.stages import WHOLE, Stage
from rustvllm.exceptions import ModelLoadError
from rustvllm.models.classifier import classifying, headless
from rustvllm.models.interface import CausalLM

if TYPE_CHECKING:
    from rustvllm.config import ModelConfig


def get_model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture; imports only that model's module.

    Raises:
        ModelLoadError: The architecture is not supported; the message lists the supported ones.
    """
    row = ARCHITECTURES.get(architecture)
    if row is None:
        raise ModelLoadError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    model_class: type[CausalLM] = getattr(importlib.import_module(f"rustvllm.models.{row.module}"), row.name)
    return model_class


def make_model(model_config: ModelConfig, group: RankGroup = ALONE, stage: Stage = WHOLE) -> Callable[[], CausalLM]:
    """A function that builds a configuration's model, in torch's default dtype and device.

    Args:
        model_config: The model's configuration.
        group: The ranks that share its layers.
        stage: Which layers it has.

    Raises:
        ModelLoadError: The architecture is not supported, or cannot be shared.
    """
    # The loader handles how weights are stored: a model is the same for every kind of quantization.
    stored = ("quantization_config", "compression_config")
    hf_config = {key: value for key, value in model_config.hf_config.items() if key not in stored}
    max_model_len = model_config.max_model_len
    if model_config.model_impl != "transformers":
        model_class = get_model_class(model_config.architecture)
        if (pooler := model_config.pooler) is not None and pooler.classifier is not None:
            model_class = classifying(model_class, pooler.classifier, model_config.embedding_size)
        elif pooler is not None:
            model_class = headless(model_class)
        return partial(model_class, hf_config, max_model_len)
    if group.size > 1:
        raise ModelLoadError(
            f"transformers' own code runs {model_config.architecture}, and ranks cannot share its layers: set "
            f"tensor_parallel_size to 1 instead of {group.size}"
        )
    if stage.count > 1:
        raise ModelLoadError(
            f"transformers' own code runs {model_config.architecture}, and its layers cannot be split into stages: set "
            f"pipeline_parallel_size to 1 instead of {stage.count}"
        )
    # Imported here, because its import of transformers takes seconds.
    from rustvllm.models.fallback.model import TransformersForCausalLM

    return partial(
        TransformersForCausalLM,
        hf_config,
        max_model_len,
        architecture=model_config.architecture,
        folder=model_config.path,
        trust_remote_code=model_config.trust_remote_code,
    )
