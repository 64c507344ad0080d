"""What streams out of the core, put together, is what ``tokenizers`` and transformers decode from the whole answer.

Answers are given token by token through the real scheduler, and read at random times: text with everything that breaks
detokenisers, cut anywhere, and ids at random, which are mostly no valid text at all.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_engine import make_scheduler
from hypothesis import given
from hypothesis import strategies as st

from rustvllm import _core

FOLDERS = [
    "gpt2-tokenizer",  # byte-level BPE
    "stories260K/hf",  # Llama's SentencePiece with byte fallback
    "modern-tokenizers/phi-3-mini",  # the same with 32,000 entries and special tokens of a chat
    "modern-tokenizers/minimind",  # ChatML
    "slm4096-gpt2/hf",  # characters
]
PARTS = [
    "Hello", " world", "  ", "\n\n", "\t", "don't", " 12.5", "a", "Ａ",
    # emoji: with joiners, skin tones, a variation selector, a keycap, flags, a flag made of tags
    "😀", "👨‍👩‍👧‍👦", "👩🏽‍🚀", "❤️‍🔥", "☺️", "1️⃣", "🇩🇪🇯🇵", "🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    # scripts: CJK with an extension, Hangul whole and as Jamo, Thai, Devanagari and Tamil with joiners, Khmer
    "日本語", "漢字𠮷", "，。", "한국어", "\u1112\u1161\u11ab\u1100\u1173\u11af", "ภาษาไทย", "क्षि", "நி", "ខ្មែរ",
    # from right to left, with marks that say so
    "שלום", "العربية\u200f", "\u202eabc\u202c",
    # combining marks: one, many, alone
    "e\u0301", "Z\u0351\u036b\u0343\u0337", "\u0301", "ﬁ", "İ", "ß",
    # what is not a character, or means something to tokenizers
    "\x00", "\x7f", "\u200b", "\u00a0", "\ufeff", "\ufffd", "\U0010ffff", "▁", "Ġ", "##", "<0x41>", "<0xF0>", "<unk>",
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|end|>",
]  # fmt: skip


class Streams:
    """Requests of one tokenizer through a scheduler, their tokens given by hand."""

    def __init__(self, folder: Path) -> None:
        import tokenizers
        import transformers

        self.ours = _core.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.transformers = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        self.size = len(self.transformers)
        # An answer begins anew after it: it is plain text in every vocabulary.
        self.plain = self.ours.token_to_id("a")
        byte_tokens = [self.ours.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self.byte_ids = [token_id for token_id in byte_tokens if token_id is not None] or list(range(256))
        self.byte_ids = [token_id for token_id in self.byte_ids if token_id < self.size]
        self.scheduler = make_scheduler(max_model_len=4096, num_blocks=512)
        self.processor = _core.OutputProcessor(self.ours)

    def stream(
        self, prompt: Sequence[int], output: Sequence[int], pauses: Sequence[int], *, skip: bool, rendered: bool
    ) -> str:
        """The news of one answer put together, deltas or rendered events, read after so many tokens each time."""
        key = self.scheduler.handle.new_key()
        template = (b'data: {"text":', b"}\n\n") if rendered else None
        self.processor.add_request(key, prompt, skip_special_tokens=skip, event_template=template)
        self.scheduler.handle.add_request(key, str(key), prompt, max_tokens=len(output))
        reads = set(itertools.accumulate(itertools.islice(itertools.cycle(pauses), len(output))))
        text, token_ids, reasons = "", [], []

        def read() -> None:
            nonlocal text
            events, deltas = self.processor.poll(self.scheduler.handle)
            for event_key, event in events:
                assert event_key == key
                # Several may come at once.
                parts = event.decode().split("\n\n")
                assert parts.pop() == ""
                text += "".join(json.loads(part.removeprefix("data: "))["text"] for part in parts)
            for delta in deltas:
                assert delta.key == key
                text += delta.new_text
                token_ids.extend(delta.new_token_ids)
                reasons.append(delta.finish_reason)

        for number, token_id in enumerate(output, 1):
            step = self.scheduler.schedule()
            assert step is not None
            self.scheduler.update_from_output(step, np.array([[token_id]], np.int32))
            if number in reads:
                read()
        read()
        assert (token_ids, reasons[-1], len(self.processor)) == (list(output), "length", 0)
        return text

    def check(self, prompt: Sequence[int], output: Sequence[int], pauses: Sequence[int], *, skip: bool) -> None:
        """Compare with both oracles."""
        streamed = self.stream(prompt, output, pauses, skip=skip, rendered=False)
        assert self.stream(prompt, output, pauses, skip=skip, rendered=True) == streamed
        for decode in (self._decode_library, self._decode_transformers):
            before, whole = decode(prompt, skip=skip), decode([*prompt, *output], skip=skip)
            assert whole.startswith(before)
            assert streamed == whole[len(before) :], f"{decode.__name__}, prompt {prompt}, output {output}"

    def _decode_library(self, token_ids: Sequence[int], *, skip: bool) -> str:
        return str(self.library.decode(list(token_ids), skip_special_tokens=skip))

    def _decode_transformers(self, token_ids: Sequence[int], *, skip: bool) -> str:
        text = self.transformers.decode(list(token_ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return str(text)


@pytest.fixture(scope="module", params=FOLDERS)
def streams(request: pytest.FixtureRequest, shared_dir: Path) -> Streams:
    return Streams(shared_dir / "data" / request.param)


def texts() -> st.SearchStrategy[str]:
    part = st.sampled_from(PARTS) | st.text(max_size=4)
    return st.lists(part, max_size=12).map("".join)


PAUSES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(data=st.data(), prompt=texts(), answer=texts(), pauses=PAUSES, skip=st.booleans())
def test_awkward_text_cut_anywhere(
    streams: Streams, data: st.DataObject, prompt: str, answer: str, pauses: list[int], skip: bool
) -> None:
    whole = streams.ours.encode(answer, False)
    first = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(first, len(whole)))
    output = whole[first:end] or [streams.plain]
    streams.check([*streams.ours.encode(prompt), streams.plain], output, pauses, skip=skip)


@given(data=st.data(), pauses=PAUSES, skip=st.booleans())
def test_random_ids(streams: Streams, data: st.DataObject, pauses: list[int], skip: bool) -> None:
    any_id = st.integers(0, streams.size - 1)
    # Bytes make and break characters; special tokens are among the first and the last.
    near_the_ends = st.integers(0, 5) | st.integers(max(0, streams.size - 12), streams.size - 1)
    token = any_id | st.sampled_from(streams.byte_ids) | near_the_ends
    prompt = data.draw(st.lists(token, max_size=8))
    output = data.draw(st.lists(token, min_size=1, max_size=40))
    streams.check([*prompt, streams.plain], output, pauses, skip=skip)


def test_every_part_alone_and_after_another(streams: Streams) -> None:
    for one, other in [("", part) for part in PARTS] + list(itertools.pairwise(PARTS)):
        output = streams.ours.encode(one + other, False)
        if output:
            for skip in (True, False):
                streams.check([streams.plain], output, [1], skip=skip)


def test_every_token_of_the_vocabulary_in_one_answer(streams: Streams) -> None:
    """In an order that puts halves of characters next to all kinds of others."""
    order = np.random.default_rng(0).permutation(streams.size)
    for start in range(0, streams.size, 2000):
        part: list[Any] = order[start : start + 2000].tolist()
        streams.check([streams.plain], part, [7], skip=False)
