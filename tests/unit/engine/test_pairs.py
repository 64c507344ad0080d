"""Pairs of texts: who goes with whom, prompts made at once and off the loop alike, cosines against torch."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rustvllm import PoolingParams
from rustvllm.config import ModelConfig
from rustvllm.config.classifier import ClassifierConfig
from rustvllm.config.hub import embedded_model_path
from rustvllm.config.pooler import PoolerConfig
from rustvllm.engine.request.pairs import MAX_PAIR_CHARS, PairPrompts, as_texts, check_pair_chars, cosines, pairs_of
from rustvllm.exceptions import InvalidRequestError
from rustvllm.text.tokenizer import Tokenizer

NAMES = ("queries", "documents")


def test_one_goes_with_every_other_or_each_with_its_own():
    assert pairs_of(["a"], ["b", "c"], NAMES) == [("a", "b"), ("a", "c")]
    assert pairs_of(["a", "b"], ["c", "d"], NAMES) == [("a", "c"), ("b", "d")]
    assert pairs_of(["a"], ["b"], NAMES) == [("a", "b")]
    for firsts, seconds, param in ((["a"] * 2, ["b"], "queries"), ([], ["b"], "queries"), (["a"], [], "documents")):
        with pytest.raises(InvalidRequestError) as caught:
            pairs_of(firsts, seconds, NAMES)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        (("a",), ["a"]),
        ([{"text": "a"}, {"content": [{"type": "text", "text": "b"}]}], ["a", "b"]),
        (b"a", None),
        (7, None),
        (["a", None], None),
        ({"text": 7}, None),
        ({"content": "a"}, None),
        ({"content": [{"type": "text", "text": "a"}] * 2}, None),
        ({"content": [{"type": "image_url", "text": "a"}]}, None),
        (["\udfff"], None),
    ],
    ids=range(12),
)
def test_shapes_of_texts(given, expected):
    if expected is not None:
        assert as_texts(given, "documents") == expected
        return
    with pytest.raises(InvalidRequestError, match=r"^documents ") as caught:
        as_texts(given, "documents")
    assert caught.value.param == "documents"


def test_the_size_of_all_pairs_is_limited():
    text = "a" * (MAX_PAIR_CHARS // 4)
    check_pair_chars([(text, text)] * 2, "documents")
    with pytest.raises(InvalidRequestError, match=f"the limit is {MAX_PAIR_CHARS}"):
        check_pair_chars([(text, text)] * 2 + [("", "a")], "documents")


def test_cosines_are_torchs():
    rng = np.random.default_rng(0)
    vectors = {str(number): rng.standard_normal(33).astype(np.float32) for number in range(6)}
    vectors |= {"zero": np.zeros(33, np.float32), "same": vectors["1"], "large": np.full(33, 1e30, np.float32)}
    pairs = [("0", "1"), ("0", "2"), ("3", "4"), ("1", "same"), ("0", "zero"), ("zero", "zero"), ("large", "large")]
    wanted = [
        float(
            torch.nn.functional.cosine_similarity(*(torch.from_numpy(vectors[name]).double() for name in pair), dim=0)
        )
        for pair in pairs
    ]
    np.testing.assert_allclose(cosines(pairs, vectors), wanted, atol=1e-12, rtol=0)


def prompts_of(*, joins, tokenizer_path):
    classifier = ClassifierConfig(num_labels=1, activation="sigmoid", joins_texts=joins)
    model = ModelConfig(
        model="m", path=Path("/nowhere"), tokenizer_path=tokenizer_path, architecture="LlamaForCausalLM",
        dtype="float32", max_model_len=40_000, vocab_size=2048, hidden_size=8, num_layers=1, num_attention_heads=1,
        num_kv_heads=1, head_dim=8, pooler=PoolerConfig(classifier=classifier),
    )  # fmt: skip
    return PairPrompts(model, Tokenizer.from_folder(tokenizer_path))


@pytest.mark.parametrize("joins", [False, True], ids=["pair of the tokenizer", "joined"])
@pytest.mark.parametrize("keep", [None, 5, -1])
async def test_prompts_off_the_loop_are_the_same(joins, keep):
    made = prompts_of(joins=joins, tokenizer_path=embedded_model_path())
    long = "Once upon a time " * 5000
    pairs = [("a", "b"), ("a", long), (long, long), ("a", "b"), ("", "b")]
    params = PoolingParams(truncate_prompt_tokens=keep)

    def plain(prompts):
        return [prompt if isinstance(prompt, str) else list(prompt["prompt_token_ids"]) for prompt in prompts]

    now = plain(made.make(pairs, params))
    assert plain(await made.make_off_loop(pairs, params)) == now
    if not joins and keep == 5:
        assert [len(ids) for ids in now] == [2, 5, 5, 2, 1]
    if joins:
        assert now == [first + second for first, second in pairs]


def test_a_pair_that_cannot_fit_is_refused_before_it_is_tokenised():
    for joins in (False, True):
        made = prompts_of(joins=joins, tokenizer_path=embedded_model_path())
        for call in (made.make, lambda *given, made=made: asyncio.run(made.make_off_loop(*given))):
            with pytest.raises(InvalidRequestError, match=r"at least .* input tokens"):
                call([("a" * 600_000, "a" * 600_000)], PoolingParams())


def test_a_tokenizer_that_says_nothing_of_pairs_is_named_when_one_is_scored(tmp_path):
    both = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    template = {"type": "TemplateProcessing", "single": both[:1], "pair": both, "special_tokens": {}}
    content = json.loads((embedded_model_path() / "tokenizer.json").read_text())
    content["post_processor"] = {"type": "Sequence", "processors": [template, template]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    made = prompts_of(joins=False, tokenizer_path=tmp_path)
    with pytest.raises(
        InvalidRequestError, match=r"several post-processors .*: this engine cannot score pairs"
    ) as caught:
        made.make([("a", "b")], PoolingParams())
    assert str(tmp_path) in str(caught.value)
