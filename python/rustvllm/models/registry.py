"""Which class serves which architecture name of a ``config.json``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rustvllm.exceptions import ModelLoadError
from rustvllm.models.gemma2 import Gemma2ForCausalLM
from rustvllm.models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from rustvllm.models.gpt2 import GPT2LMHeadModel
from rustvllm.models.gpt_neox import GPTNeoXForCausalLM
from rustvllm.models.interface import CausalLM
from rustvllm.models.llama import LlamaForCausalLM
from rustvllm.models.mistral import MistralForCausalLM
from rustvllm.models.opt import OPTForCausalLM
from rustvllm.models.phi3 import Phi3ForCausalLM
from rustvllm.models.qwen2 import Qwen2ForCausalLM
from rustvllm.models.qwen3 import Qwen3ForCausalLM

if TYPE_CHECKING:
    from rustvllm.config import ModelConfig

MODELS: dict[str, type[CausalLM]] = {
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "GPTNeoXForCausalLM": GPTNeoXForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
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
