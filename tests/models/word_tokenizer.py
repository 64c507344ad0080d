"""A tokenizer of 97 words for tiny checkpoints: ``w0`` to ``w92`` and a few with a meaning."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = {"<s>": 93, "</s>": 94}
WORDS = {**{f"w{index}": index for index in range(93)}, **SPECIAL, "no": 95, "yes": 96}
TEMPLATE = processors.TemplateProcessing(
    single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=list(SPECIAL.items())
)


def write_tokenizer(folder, post_processor=None, config=None):
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; returns the tokenizer of Hugging Face's package."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer
