"""Which class serves which architecture name of a ``config.json``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rustvllm.exceptions import ModelLoadError
from rustvllm.models.gpt2 import GPT2LMHeadModel
from rustvllm.models.interface import CausalLM
from rustvllm.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from rustvllm.config import ModelConfig

MODELS: dict[str, type[CausalLM]] = {
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "LlamaForCausalLM": LlamaForCausalLM,
}


def get_model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture.

    Raises:
        ModelLoadError: it is not supported; the message lists what is.
    """
    try:
        return MODELS[architecture]
    except KeyError:
        raise ModelLoadError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}"
        ) from None


def make_model(model_config: ModelConfig) -> Callable[[], CausalLM]:
    """What builds the model of a configuration, in torch's default dtype and device.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    hf_config, max_model_len = model_config.hf_config, model_config.max_model_len
    if model_config.model_impl != "transformers":
        return partial(get_model_class(model_config.architecture), hf_config, max_model_len)
    # Imported here: what it needs of transformers takes seconds.
    from rustvllm.models.transformers_fallback import TransformersForCausalLM

    return partial(
        TransformersForCausalLM,
        hf_config,
        max_model_len,
        architecture=model_config.architecture,
        folder=model_config.path,
        trust_remote_code=model_config.trust_remote_code,
    )
