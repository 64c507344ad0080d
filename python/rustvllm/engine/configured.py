"""``ConfiguredEngine``: what an engine says of its configuration, whichever way it is driven."""

from rustvllm.config import EngineConfig, ModelConfig
from rustvllm.text.tokenizer import Tokenizer


class ConfiguredEngine:
    """The methods, for a class with these attributes.

    Attributes:
        config: What the engine was built from.
        tokenizer: None with ``skip_tokenizer_init``.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, as vLLM's engines name it."""
        return self.config.model

    @property
    def vllm_config(self) -> EngineConfig:
        """The whole configuration, under the name that scripts written for vLLM use."""
        return self.config

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValueError: There is none (``skip_tokenizer_init``).
        """
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: the engine was made with skip_tokenizer_init=True")
        return self.tokenizer
