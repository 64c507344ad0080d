"""The tokenizer object of transformers, for scripts that want it; the engine never uses it."""

from typing import Any

from rustvllm.config import ModelConfig
from rustvllm.config.checkpoint.gguf_file import GgufFile, is_gguf
from rustvllm.exceptions import ModelLoadError
from rustvllm.text import gguf_tokenizer
from rustvllm.text.model_templates import ModelTemplates


def load_transformers_tokenizer(model: ModelConfig) -> Any:
    """Load a model's tokenizer with ``transformers.AutoTokenizer``, from the files that the engine reads.

    Args:
        model: ``tokenizer_path`` is the folder or GGUF file; ``trust_remote_code`` allows code in the folder to run.

    Raises:
        ModelLoadError: transformers cannot read the files.
    """
    from transformers import AutoTokenizer  # noqa: TID251 -- the object that the caller asked for is its own

    if model.tokenizer_path is not None and is_gguf(model.tokenizer_path):
        return _of_gguf(GgufFile(model.tokenizer_path))
    try:
        return AutoTokenizer.from_pretrained(
            model.tokenizer_path, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ModelLoadError(
            f"transformers cannot load the tokenizer in {model.tokenizer_path}: {error}; the engine's own tokenizer is "
            "llm_engine.get_tokenizer()"
        ) from error


def _of_gguf(file: GgufFile) -> Any:
    """Build it from the ``tokenizer.json`` that the engine makes of the file, so that both give the same ids."""
    from tokenizers import Tokenizer  # transformers depends on it
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast  # which has no types

    config = gguf_tokenizer.tokenizer_config(file)
    special = {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}
    made = Tokenizer.from_str(gguf_tokenizer.tokenizer_json(file).decode())
    tokenizer = make(
        tokenizer_object=made,
        add_bos_token=config["add_bos_token"],
        add_eos_token=config["add_eos_token"],
        chat_template=ModelTemplates.of_gguf(file).default,
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.update_post_processor()
    return tokenizer
