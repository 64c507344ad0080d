"""Which class serves which architecture name of a ``config.json``."""

from __future__ import annotations

from rustvllm.exceptions import ModelLoadError
from rustvllm.models.gpt2 import GPT2LMHeadModel
from rustvllm.models.interface import CausalLM
from rustvllm.models.llama import LlamaForCausalLM

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
