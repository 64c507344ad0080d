"""rustvllm: serves language models with continuous batching over a paged KV cache, its control plane in Rust.

The names below are imported when they are first used, so that ``import rustvllm`` is quick and loads no torch.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rustvllm.beam_search import BeamSearchOutput as BeamSearchOutput
    from rustvllm.beam_search import BeamSearchSequence as BeamSearchSequence
    from rustvllm.config.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from rustvllm.config.engine_args import EngineArgs as EngineArgs
    from rustvllm.engine.async_llm import AsyncLLM as AsyncLLM
    from rustvllm.engine.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from rustvllm.engine.llm_engine import LLMEngine as LLMEngine
    from rustvllm.engine.request.prompts import PromptType as PromptType
    from rustvllm.engine.request.prompts import TextPrompt as TextPrompt
    from rustvllm.engine.request.prompts import TokensPrompt as TokensPrompt
    from rustvllm.llm import LLM as LLM
    from rustvllm.logprobs import Logprob as Logprob
    from rustvllm.outputs import ClassificationOutput as ClassificationOutput
    from rustvllm.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from rustvllm.outputs import CompletionOutput as CompletionOutput
    from rustvllm.outputs import EmbeddingOutput as EmbeddingOutput
    from rustvllm.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from rustvllm.outputs import PoolingOutput as PoolingOutput
    from rustvllm.outputs import PoolingRequestOutput as PoolingRequestOutput
    from rustvllm.outputs import RequestOutput as RequestOutput
    from rustvllm.outputs import ScoringOutput as ScoringOutput
    from rustvllm.outputs import ScoringRequestOutput as ScoringRequestOutput
    from rustvllm.sample.logits_processors import BatchUpdate as BatchUpdate
    from rustvllm.sample.logits_processors import LogitsProcessor as LogitsProcessor
    from rustvllm.sample.logits_processors import MoveDirectionality as MoveDirectionality
    from rustvllm.sampling_params import BeamSearchParams as BeamSearchParams
    from rustvllm.sampling_params import PoolingParams as PoolingParams
    from rustvllm.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from rustvllm.sampling_params import SamplingParams as SamplingParams
    from rustvllm.sampling_params.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from rustvllm.tenant import Tenant as Tenant

    __version__: str

_HOMES = {
    "LLM": "rustvllm.llm",
    "AsyncLLM": "rustvllm.engine.async_llm",
    "AsyncLLMEngine": "rustvllm.engine.async_llm",
    "LLMEngine": "rustvllm.engine.llm_engine",
    "PromptType": "rustvllm.engine.request.prompts",
    "TextPrompt": "rustvllm.engine.request.prompts",
    "TokensPrompt": "rustvllm.engine.request.prompts",
    "SamplingParams": "rustvllm.sampling_params",
    "BeamSearchParams": "rustvllm.sampling_params",
    "BeamSearchOutput": "rustvllm.beam_search",
    "BeamSearchSequence": "rustvllm.beam_search",
    "PoolingParams": "rustvllm.sampling_params",
    "RepetitionDetectionParams": "rustvllm.sampling_params",
    "StructuredOutputsParams": "rustvllm.sampling_params.structured_outputs",
    "Tenant": "rustvllm.tenant",
    "RequestOutput": "rustvllm.outputs",
    "CompletionOutput": "rustvllm.outputs",
    "ClassificationOutput": "rustvllm.outputs",
    "ClassificationRequestOutput": "rustvllm.outputs",
    "EmbeddingOutput": "rustvllm.outputs",
    "EmbeddingRequestOutput": "rustvllm.outputs",
    "PoolingOutput": "rustvllm.outputs",
    "PoolingRequestOutput": "rustvllm.outputs",
    "ScoringOutput": "rustvllm.outputs",
    "ScoringRequestOutput": "rustvllm.outputs",
    "Logprob": "rustvllm.logprobs",
    "EngineArgs": "rustvllm.config.engine_args",
    "AsyncEngineArgs": "rustvllm.config.engine_args",
    "LogitsProcessor": "rustvllm.sample.logits_processors",
    "BatchUpdate": "rustvllm.sample.logits_processors",
    "MoveDirectionality": "rustvllm.sample.logits_processors",
}

_NOT_BUILT = {
    "ModelRegistry": "models that rustvllm has no code for run through transformers' code (model_impl='transformers')",
    "initialize_ray_cluster": "distributed_executor_backend='ray' connects to Ray by itself",
}
"""Names of vLLM's package that are not here, and why."""

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LogitsProcessor",
    "Logprob",
    "MoveDirectionality",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "Tenant",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rustvllm")
    except PackageNotFoundError:  # a source tree on the path: the core knows its version
        from rustvllm._core import __version__

        return __version__


def _home(module: str) -> ModuleType:
    """The module; what goes wrong in it is not to read as if it were the name that is missing."""
    try:
        return import_module(module)
    except AttributeError as error:
        raise ImportError(
            f"{module} cannot be imported: {error}. If the sources are newer than the compiled core, build it again: "
            "make setup, or pip install"
        ) from error


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        value = getattr(_home(_HOMES[name]), name)
    elif name in _NOT_BUILT:  # `from rustvllm import …` would replace the words of an AttributeError by its own
        raise ImportError(f"{name} is not supported yet: {_NOT_BUILT[name]}", name=__name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
