"""The training text: documents drawn from the generators, split by what a reader would type.

A document is a story, another plain text, or a chat. The split is by its *prompts* (each user message of a chat, the first
sentence of a plain text): a hash of the normalised prompt puts it on one side for good. A training document has no
held-out prompt in it; a held-out document begins with one. So a held-out prompt never appears in the training text, while
its topic does, in other words or with other values.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tiny_model.dialogues import Message, conversation
from tiny_model.grammar import capitalise
from tiny_model.passages import passage
from tiny_model.poems import poem
from tiny_model.stories import tell_story

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (END_OF_TEXT, *ROLE_TOKENS.values(), END_OF_TURN)

HELD_OUT_ONE_IN = 12
_SHORTEST_HELD_OUT = 4  # words; a shorter prompt ("Hello") has no second wording, so all of them are trained on
_WORD = re.compile(r"\w+")
_FIRST_SENTENCE = re.compile(r"[^.!?\n]+")


@dataclass(frozen=True)
class Document:
    """One text of the corpus: its messages if it is a chat, else one message with the role "text"."""

    messages: tuple[Message, ...]

    @property
    def is_chat(self) -> bool:
        """Whether this is a chat."""
        return self.messages[0].role != "text"

    @property
    def text(self) -> str:
        """The document with its special tokens, as the model reads it."""
        if not self.is_chat:
            return self.messages[0].content + END_OF_TEXT
        return (
            "".join(f"{ROLE_TOKENS[message.role]}{message.content}{END_OF_TURN}" for message in self.messages)
            + END_OF_TEXT
        )

    @property
    def prompts(self) -> list[str]:
        """What the split is decided by: the user's messages, or the first sentence."""
        if self.is_chat:
            return [message.content for message in self.messages if message.role == "user"]
        match = _FIRST_SENTENCE.match(self.messages[0].content)
        return [match.group() if match else self.messages[0].content]


def normalise(prompt: str) -> str:
    """Return the prompt's words in lower case: two prompts that differ in marks and capitals only are the same."""
    return " ".join(_WORD.findall(prompt.lower()))


def is_held_out(prompt: str) -> bool:
    """Whether this prompt is kept out of the training text."""
    words = normalise(prompt)
    if words.count(" ") + 1 < _SHORTEST_HELD_OUT:
        return False
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big") % HELD_OUT_ONE_IN == 0


def draw_document(rng: random.Random) -> Document:
    """Draw one document of any kind: most are chats, the rest stories, poems and other plain text."""
    roll = rng.random()
    if roll < 0.62:
        return Document(tuple(conversation(rng)))
    if roll < 0.80:
        text = tell_story(rng)
    elif roll < 0.82:
        text = poem(rng)
    else:
        text = passage(rng)
    return Document((Message("text", capitalise(text)),))


def documents(seed: int, *, held_out: bool = False) -> Iterator[Document]:
    """Yield different documents without end, always the same ones for a seed.

    Args:
        seed: number of the stream.
        held_out: yield documents that begin with a held-out prompt, instead of documents without any.
    """
    seen: set[int] = set()
    index = 0
    while True:
        rng = random.Random(f"{seed}/{'held-out' if held_out else 'train'}/{index}")
        index += 1
        document = draw_document(rng)
        flags = [is_held_out(prompt) for prompt in document.prompts]
        if (not flags[0]) if held_out else any(flags):
            continue
        key = hash_text(document.text)
        if key not in seen:
            seen.add(key)
            yield document


def hash_text(text: str) -> int:
    """A 64-bit hash that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
