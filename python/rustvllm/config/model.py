"""``ModelConfig``: what a model's folder says about it, without reading the weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rustvllm.config.architectures import CLASSIFIER_ENDING
from rustvllm.config.pooler import PoolerConfig
from rustvllm.config.ranges import require_choice, require_int
from rustvllm.config.vision import VisionConfig
from rustvllm.exceptions import ConfigError, InvalidRequestError

DTYPES = ("float32", "float16", "bfloat16")
"""Names of the tensor types a model can compute in."""
MODEL_IMPLS = ("auto", "rustvllm", "transformers")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
"""Raw: as the model gave them. Processed: after penalties, masks, temperature and truncation, as they are drawn
from."""
LARGEST_MAX_LOGPROBS = 500_000
"""The most candidates of one position that fit into a frame between processes."""

_DOES: Final[Mapping[str, str]] = {
    "generate": "generates text here and",
    "embed": "makes embeddings here and",
    "classify": "classifies here and",
}
_NOT: Final[Mapping[str, str]] = {
    "generate": "generates no text",
    "embed": "makes no embeddings",
    "classify": "does not classify",
    "score": "gives no scores",
}
_CALLS: Final[Mapping[str, str]] = {
    "generate": "LLM.generate or POST /v1/completions",
    "embed": "LLM.embed or POST /v1/embeddings",
    "classify": "LLM.classify or POST /classify",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a model's folder says about it, without reading the weights.

    Attributes:
        model: The name it was asked for by.
        path: Folder with ``config.json`` and the weights, or a GGUF file.
        revision: Branch, tag or commit on the hub.
        tokenizer: Name of the tokenizer when it was given apart from the model.
        tokenizer_path: Folder with ``tokenizer.json``, or a GGUF file; None with ``skip_tokenizer_init``.
        hf_config: ``config.json`` as it is.
        config_file: What ``hf_config`` was read from, for messages: a ``config.json``, or a GGUF file.
        architecture: Model class, for instance ``LlamaForCausalLM``.
        dtype: ``float32``, ``float16`` or ``bfloat16`` (``auto`` only before it is resolved).
        max_model_len: Most tokens of prompt and output together.
        fit_max_model_len: Lower it to what the KV cache can hold, once that is known.
        vocab_size: Rows of the embedding; token ids are below it.
        hidden_size: Width of the residual stream.
        num_layers: Transformer layers.
        num_attention_heads: Query heads.
        num_kv_heads: Key and value heads (fewer than query heads with GQA).
        head_dim: Width of one head.
        seed: Seed of the engine: dummy weights, and requests without a seed of their own.
        skip_tokenizer_init: Serve token ids only.
        served_model_name: Names that clients may use; the first is reported.
        eos_token_ids: Ids that end a generation, from generation_config.json, else config.json.
        generation_config: The model's own sampling defaults, ``{}`` when there are none.
        enforce_eager: Never capture CUDA graphs.
        max_logprobs: Most candidates per place whose log-probabilities a request may ask for; -1: the whole vocabulary.
        logprobs_mode: What is given as log-probabilities of sampled tokens, one of ``LOGPROBS_MODES``.
        logits_processors: Batch classes that change logits, as ``module:Class``; or, in one process, the classes.
        trust_remote_code: Python code of the model's folder may run, if no built-in code knows the architecture.
        model_impl: Whose modelling code runs: ``rustvllm`` or ``transformers``.
        pooler: How prompts become embeddings, or numbers for labels; None: the model generates text.
        vision: Which images prompts may have; None: the model sees none.
    """

    model: str
    path: Path
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_path: Path | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    architecture: str
    dtype: str = "auto"
    max_model_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    seed: int = 0
    skip_tokenizer_init: bool = False
    served_model_name: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    enforce_eager: bool = False
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    trust_remote_code: bool = False
    logits_processors: tuple[Any, ...] = ()
    model_impl: str = "rustvllm"
    fit_max_model_len: bool = False
    config_file: Path | None = None
    pooler: PoolerConfig | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        require_choice("model_impl", self.model_impl, MODEL_IMPLS[1:])
        require_choice("dtype", self.dtype, ("auto", *DTYPES))
        for name in ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim"):
            require_int(name, getattr(self, name), 1)
        require_int("max_model_len", self.max_model_len, 1)
        require_int("max_logprobs", self.max_logprobs, -1, LARGEST_MAX_LOGPROBS)
        if self.max_logprobs == -1 and self.vocab_size > LARGEST_MAX_LOGPROBS:
            raise ConfigError(
                f"max_logprobs=-1 means the whole vocabulary, which has {self.vocab_size} tokens; the limit is "
                f"{LARGEST_MAX_LOGPROBS}"
            )
        require_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        require_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.num_attention_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        # Read-only views: threads share the configuration, so it must not change.
        object.__setattr__(self, "hf_config", MappingProxyType(dict(self.hf_config)))
        object.__setattr__(self, "generation_config", MappingProxyType(dict(self.generation_config)))
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", (self.model,))

    @property
    def runner_type(self) -> str:
        """What its engine does, as vLLM names it: ``generate`` or ``pooling``."""
        return "generate" if self.pooler is None else "pooling"

    @property
    def task(self) -> str:
        """What its engine does with a prompt, as vLLM names it: ``generate``, ``embed`` or ``classify``."""
        return "generate" if self.pooler is None else self.pooler.task

    def check_task(self, needed: str) -> None:
        """Refuse what the engine does not do.

        Args:
            needed: ``generate``, ``embed``, ``classify``, or ``score``, which engines that embed can do, and those that
                classify with one label.

        Raises:
            InvalidRequestError: Says what the engine does, and what would do the other.
        """
        if needed == self.task or (needed == "score" and self.task == "embed"):
            return
        classifier = None if self.pooler is None else self.pooler.classifier
        if needed == "score" and classifier is not None and classifier.num_labels == 1:
            return
        name = self.served_model_name[0]
        raise InvalidRequestError(f"{name} {_DOES[self.task]} {_NOT[needed]}: {self._instead(needed)}", "model")

    def _instead(self, needed: str) -> str:
        """What works, where the engine does not do what is needed."""
        own = _CALLS[self.task]
        classifier = None if self.pooler is None else self.pooler.classifier
        if needed == "generate" and classifier is not None and not classifier.tokens:
            return f"use {own}"  # its checkpoint has no head
        if needed == "generate":
            return f"use {own}, or start the engine with --runner generate"
        if needed == "score" and classifier is not None:
            return f"a score needs a model with one label, and it has {classifier.num_labels}; use {own}"
        if needed == "score":
            return 'start the engine with --runner pooling (LLM(..., runner="pooling"))'
        if needed == "classify":
            return (
                f"use {own}, or a model whose class ends in {CLASSIFIER_ENDING}, or --convert classify with "
                "classifier_from_token and method in --hf-overrides"
            )
        if self.task == "classify":
            return f'use {own}, or start the engine with --convert embed (LLM(..., convert="embed"))'
        return 'start the engine with --runner pooling (LLM(..., runner="pooling"))'

    @property
    def embedding_size(self) -> int:
        """Numbers in an embedding, and width of the states that are pooled."""
        projected = self.hf_config.get("word_embed_proj_dim") if self.architecture == "OPTForCausalLM" else None
        return projected if isinstance(projected, int) else self.hidden_size

    @property
    def pooled_size(self) -> int:
        """Numbers of the vector that a prompt gives: those of an embedding, or one for each label."""
        classifier = None if self.pooler is None else self.pooler.classifier
        return self.embedding_size if classifier is None else classifier.num_labels

    def check_dimensions(self, dimensions: int, error: Callable[[str], Exception]) -> None:
        """Refuse to shorten embeddings of a model that was not trained for it, or to another size.

        Args:
            dimensions: Numbers that are kept.
            error: Makes the error of its message.
        """
        known = self.hf_config.get("matryoshka_dimensions")
        if not known and self.hf_config.get("is_matryoshka") is not True:
            raise error(
                f"dimensions is {dimensions}, but {self.served_model_name[0]} was not trained for shorter embeddings: "
                "leave dimensions out (a model that was says is_matryoshka or matryoshka_dimensions in config.json, "
                "or in hf_overrides)"
            )
        if not 1 <= dimensions <= self.embedding_size:
            raise error(f"dimensions must be between 1 and {self.embedding_size}, got {dimensions}")
        if isinstance(known, list) and dimensions not in known:
            raise error(f"dimensions must be one of {', '.join(map(str, known))}, got {dimensions}")

    def check_num_logprobs(self, param: str, asked: int | None) -> None:
        """Refuse more candidates than a request may ask for.

        Args:
            param: The parameter, for the message.
            asked: Candidates per place; -1: the vocabulary; None if the request asks for none.

        Raises:
            InvalidRequestError: Names the parameter, the value and the limit.
        """
        most = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        num_asked = self.vocab_size if asked == -1 else asked
        if num_asked is None or num_asked <= most or self.max_logprobs == -1:
            return
        shown = f"-1 (the vocabulary of {self.vocab_size} tokens)" if asked == -1 else asked
        raise InvalidRequestError(
            f"{param} is {shown}, but the limit is {most}; raise the engine's max_logprobs for more (-1: no limit)",
            param,
        )
