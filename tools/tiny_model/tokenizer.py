"""The tokenizer: byte-level BPE trained on the corpus, and the template that lays out a chat."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tiny_model.corpus import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS

VOCAB_SIZE = 2048

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('this model knows the roles system, user and assistant, not ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train byte-level BPE on ``texts``. Every byte is in the alphabet, so any text can be encoded.

    Returns:
        A tokenizer whose first ids are `SPECIAL_TOKENS`, in that order.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(context: int) -> dict[str, object]:
    """The content of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "extra_special_tokens": {},
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != END_OF_TEXT],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }


def stop_token_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids after which generation stops: end of text, and end of a turn."""
    return [tokenizer.token_to_id(token) for token in (END_OF_TEXT, END_OF_TURN)]
