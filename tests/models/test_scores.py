"""Scores of pairs against transformers: cosines of embeddings, and classifiers that read a pair in three ways."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import make
from test_classification import PAD, make_classifier
from transformers import AutoTokenizer  # noqa: TID251 -- the oracle
from word_tokenizer import TEMPLATE, write_tokenizer

from rustvllm import LLM, PoolingParams
from rustvllm.exceptions import InvalidRequestError
from rustvllm.text.chat_template import render_chat

OPTIONS = {"max_model_len": 64, "num_gpu_blocks_override": 200, "block_size": 4}
TIGHT = {
    "num_gpu_blocks_override": 24, "max_num_batched_tokens": 16, "max_num_seqs": 8, "long_prefill_token_threshold": 5,
}  # fmt: skip
TOLERANCE = 1e-5
QUERY = "w3 w4 w5"
DOCUMENTS = ["w8 w9", "w3 w4 w5 w6", "w70", " ".join(f"w{index}" for index in range(20, 50)), "w8 w9"]
QUERIES = [QUERY, "w1", "w2 w2", "w3", "w60 w61"]
JINJA = """w90 {{ messages[1]['content'] }} w91 {{ messages | selectattr('role', 'eq', 'query')
| map(attribute='content') | first }}"""


def scores(outputs):
    return np.array([output.outputs.score for output in outputs])


def saved(model, folder, post_processor=None):
    model.save_pretrained(folder)
    write_tokenizer(folder, post_processor)
    return str(folder), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def cosines(model, tokenizer, firsts, seconds):
    def vector(text):
        return model.base_model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1].double()

    both = zip(firsts, seconds, strict=True)
    return [float(torch.nn.functional.cosine_similarity(vector(one), vector(other), dim=0)) for one, other in both]


def test_embeddings_give_cosines(tmp_path):
    folder, tokenizer = saved(make("qwen3", {}), tmp_path, TEMPLATE)
    model = make("qwen3", {})
    with LLM(folder, runner="pooling", **OPTIONS) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        wanted = cosines(model, tokenizer, [QUERY] * 5, DOCUMENTS)
        np.testing.assert_allclose(scores(outputs), wanted, atol=TOLERANCE, rtol=0)
        assert np.ptp(wanted) > 100 * TOLERANCE
        ids = tokenizer(QUERY)["input_ids"] + tokenizer(DOCUMENTS[1])["input_ids"]
        assert (outputs[1].request_id, outputs[1].prompt_token_ids, outputs[1].finished) == ("0_2", ids, True)
        counts = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:prompt_tokens"]
        each = {QUERY, *DOCUMENTS}
        assert counts == [sum(len(tokenizer(text)["input_ids"]) for text in each)], "each text is computed once"
        outputs = llm.score(QUERIES, DOCUMENTS, use_tqdm=False)
        np.testing.assert_allclose(
            scores(outputs), cosines(model, tokenizer, QUERIES, DOCUMENTS), atol=TOLERANCE, rtol=0
        )
        [one] = llm.score({"text": QUERY}, {"content": [{"type": "text", "text": "w70"}]}, use_tqdm=False)
        assert one.outputs.score == pytest.approx(wanted[2], abs=TOLERANCE)
        raw = llm.score(QUERY, DOCUMENTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        np.testing.assert_allclose(scores(raw), wanted, atol=TOLERANCE, rtol=0)


def test_a_cross_encoder_reads_what_its_tokenizer_makes_of_pairs(tmp_path):
    model = make_classifier("qwen3", 1)
    folder, tokenizer = saved(model, tmp_path, TEMPLATE)

    @torch.no_grad()
    def expected(firsts, seconds, **cut):
        batch = tokenizer(firsts, seconds, **cut)["input_ids"]
        width = max(map(len, batch))
        ids = torch.tensor([[*each, *[PAD] * (width - len(each))] for each in batch])
        return batch, torch.sigmoid(model(ids, attention_mask=(ids != PAD).long()).logits)[:, 0].double().numpy()

    for options in (OPTIONS, OPTIONS | TIGHT):
        with LLM(folder, **options) as llm:
            outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
            batch, wanted = expected([QUERY] * 5, DOCUMENTS)
            assert [output.prompt_token_ids for output in outputs] == batch
            np.testing.assert_allclose(scores(outputs), wanted, atol=TOLERANCE, rtol=0)
            assert np.ptp(wanted) > 100 * TOLERANCE
            outputs = llm.score(QUERIES, DOCUMENTS, use_tqdm=False)
            np.testing.assert_allclose(scores(outputs), expected(QUERIES, DOCUMENTS)[1], atol=TOLERANCE, rtol=0)
            for keep in (8, 12, 20):
                cut = PoolingParams(truncate_prompt_tokens=keep)
                outputs = llm.score(QUERIES, DOCUMENTS, pooling_params=cut, use_tqdm=False)
                batch, wanted = expected(QUERIES, DOCUMENTS, truncation="longest_first", max_length=keep)
                assert [output.prompt_token_ids for output in outputs] == batch
                np.testing.assert_allclose(scores(outputs), wanted, atol=TOLERANCE, rtol=0)
            left = PoolingParams(truncate_prompt_tokens=4, truncation_side="left")
            outputs = llm.score(QUERIES, DOCUMENTS, pooling_params=left, use_tqdm=False)
            assert [output.prompt_token_ids for output in outputs] == [
                ids[-4:] for ids in expected(QUERIES, DOCUMENTS)[0]
            ]


def test_texts_are_joined_or_put_into_a_template(tmp_path):
    model = make_classifier("qwen3", 1)
    folder, tokenizer = saved(model, tmp_path, TEMPLATE)

    @torch.no_grad()
    def expected(texts):
        logits = [model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0] for text in texts]
        return torch.sigmoid(torch.stack(logits)).double().numpy()

    joined = expected([f"{QUERY} {document}" for document in DOCUMENTS])
    rendered = expected([f"w90 {document} w91 {QUERY}" for document in DOCUMENTS])
    with LLM(folder, hf_overrides={"use_sep_token": False}, **OPTIONS) as llm:
        found = scores(llm.score(f"{QUERY} ", DOCUMENTS, use_tqdm=False))
        np.testing.assert_allclose(found, joined, atol=TOLERANCE, rtol=0)
        found = scores(llm.score(QUERY, DOCUMENTS, chat_template=JINJA, use_tqdm=False))
        np.testing.assert_allclose(found, rendered, atol=TOLERANCE, rtol=0)
    with LLM(folder, chat_template=JINJA, **OPTIONS) as llm:
        found = scores(llm.score(QUERY, DOCUMENTS, use_tqdm=False))
        np.testing.assert_allclose(found, rendered, atol=TOLERANCE, rtol=0)
        with pytest.raises(InvalidRequestError, match="The chat template is not valid"):
            llm.score(QUERY, DOCUMENTS, chat_template="{{ messages")


def test_with_batch_invariance_no_bit_depends_on_the_batch(tmp_path):
    folder, _ = saved(make_classifier("qwen3", 1), tmp_path)
    for options in ({}, {"convert": "embed"}):
        with LLM(folder, batch_invariant=True, **(OPTIONS | options)) as llm:
            alone = [scores(llm.score(QUERY, document, use_tqdm=False))[0] for document in DOCUMENTS]
        with LLM(folder, batch_invariant=True, **(OPTIONS | TIGHT | options)) as llm:
            together = scores(llm.score(QUERY, DOCUMENTS, use_tqdm=False))
        assert together.tobytes() == np.array(alone).tobytes()


def test_what_is_wrong_is_named(tmp_path):
    folder, _ = saved(make_classifier("qwen3", 1), tmp_path)
    with LLM(folder, **OPTIONS) as llm:
        for given, options, says in (
            (("a", []), {}, "data_2 is empty"),
            (([], "a"), {}, "data_1 is empty"),
            ((["a", "b"], ["a", "b", "c"]), {}, "data_1 has 2 texts and data_2 has 3"),
            (("a", ["b", 7]), {}, "data_2 element 1 must be a text, got 7"),
            ((None, "b"), {}, "data_1 must be a text, got None"),
            (({"image": "b"}, "b"), {}, 'data_1 must have a "text"'),
            (("a", {"content": [{"type": "image_url"}]}), {}, "images are not supported"),
            (("a", "\ud800"), {}, "lone surrogate"),
            (("w1 " * 40, ["b", "w1 " * 40]), {}, "at most 64 fit"),
            (("a" * 2000, "b"), {}, "64"),
            (("", ""), {}, "at least one token"),
            (("a", "b"), {"pooling_params": [PoolingParams()]}, "must be a PoolingParams, got list"),
            (("a", "b"), {"pooling_params": PoolingParams(task="embed")}, "makes no embeddings"),
            (("a", "b"), {"chat_template": 7}, "chat_template must be text, got int"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                llm.score(*given, **options)
        assert len(llm.score("w1", ["w2"], use_tqdm=False)) == 1
    with (
        LLM(folder, skip_tokenizer_init=True, **OPTIONS) as llm,
        pytest.raises(InvalidRequestError, match="there is no tokenizer"),
    ):
        llm.score("a", "b")
    model = make_classifier("qwen3", 3)
    model.save_pretrained(folder)
    with (
        LLM(folder, **OPTIONS) as llm,
        pytest.raises(InvalidRequestError, match="gives no scores: a score needs a model with one label, and it has 3"),
    ):
        llm.score("a", "b")
    with (
        LLM(**(OPTIONS | {"block_size": 16})) as llm,
        pytest.raises(InvalidRequestError, match="generates text here and gives no"),
    ):
        llm.score("a", "b")


@pytest.mark.parametrize("instruction", [None, "Find rain"])
def test_the_template_for_qwen3_reranker_renders_what_it_was_trained_on(repository, instruction):
    source = (repository / "examples" / "qwen3_reranker.jinja").read_text()
    messages = [{"role": "query", "content": "a {{ q }}"}, {"role": "document", "content": "b\nc"}]
    variables = {} if instruction is None else {"instruction": instruction}
    found = render_chat(SimpleNamespace(), messages, chat_template=source, add_generation_prompt=False, **variables)
    task = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    assert found == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {task}\n<Query>: a {{{{ q }}}}\n<Document>: b\nc<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
