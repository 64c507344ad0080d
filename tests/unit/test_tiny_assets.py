"""The embedded model's folder and the generator of its training text, without running the model."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "python" / "rustvllm" / "assets" / "tiny"
SPECIAL_TOKENS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def load_json(name):
    return json.loads((FOLDER / name).read_text())


@pytest.fixture(scope="module")
def corpus():
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        import tiny_model.corpus

        yield tiny_model.corpus
    finally:
        sys.path.remove(str(REPOSITORY / "tools"))


def render(messages, **values):
    def raise_exception(message):
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    template = environment.from_string(load_json("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, **values)


def test_the_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 10_000_000


def test_the_weights_fit_the_config():
    config = load_json("config.json")
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["model_type"] == "gpt2"
    assert config["torch_dtype"] == "float16"
    width, vocab = config["n_embd"], config["vocab_size"]
    expected = {
        "transformer.wte.weight": [vocab, width],
        "transformer.wpe.weight": [config["n_positions"], width],
        "transformer.ln_f.weight": [width],
        "transformer.ln_f.bias": [width],
    }
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            expected[f"{prefix}{name}.weight"] = [inputs, outputs]
            expected[f"{prefix}{name}.bias"] = [outputs]
        for name in ("ln_1", "ln_2"):
            expected[f"{prefix}{name}.weight"] = expected[f"{prefix}{name}.bias"] = [width]
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118 - not a mapping
        dtypes = {weights.get_slice(name).get_dtype() for name in shapes}
    assert shapes == expected
    assert dtypes == {"F16"}
    assert config["tie_word_embeddings"] is True


def test_special_tokens_are_single_ids_and_stop_generation():
    assert [TOKENIZER.encode(token).ids for token in SPECIAL_TOKENS] == [[0], [1], [2], [3], [4]]
    assert load_json("generation_config.json")["eos_token_id"] == [0, 4]
    assert load_json("config.json")["eos_token_id"] == 0
    assert load_json("tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    assert TOKENIZER.get_vocab_size() == load_json("config.json")["vocab_size"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_the_tokenizer_gives_any_text_back(text):
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < TOKENIZER.get_vocab_size() for token in ids)


def test_ordinary_words_are_single_tokens():
    assert TOKENIZER.encode(" capital").tokens == ["Ġcapital"]
    assert len(TOKENIZER.encode("Once upon a time, there was a little fox.").ids) <= 14


def test_the_chat_template_renders_what_the_model_was_trained_on(corpus):
    chats = (document for document in corpus.documents(3) if document.is_chat)
    for document in itertools.islice(chats, 50):
        messages = [{"role": message.role, "content": message.content} for message in document.messages]
        assert render(messages) + "<|endoftext|>" == document.text


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("user", "Hi!")], "<|user|>Hi!<|end|><|assistant|>"),
        ([("system", "Be kind."), ("user", "Hi!")], "<|system|>Be kind.<|end|><|user|>Hi!<|end|><|assistant|>"),
        (
            [("user", "Hi!"), ("assistant", "Hello."), ("user", "Bye.")],
            "<|user|>Hi!<|end|><|assistant|>Hello.<|end|><|user|>Bye.<|end|><|assistant|>",
        ),
    ],
)
def test_a_prompt_ends_where_the_assistant_begins(messages, expected):
    messages = [{"role": role, "content": content} for role, content in messages]
    assert render(messages, add_generation_prompt=True) == expected
    assert render(messages, add_generation_prompt=False) == expected.removesuffix("<|assistant|>")


def test_an_unknown_role_is_named():
    with pytest.raises(ValueError, match="not tool"):
        render([{"role": "tool", "content": "4"}], add_generation_prompt=True)


def test_the_corpus_is_the_same_for_a_seed_and_differs_between_seeds(corpus):
    first, again, other = (
        [document.text for document in itertools.islice(corpus.documents(seed), 300)] for seed in (11, 11, 12)
    )
    assert first == again
    assert len(set(first)) == 300
    assert len(set(first) & set(other)) < 30


def test_no_held_out_prompt_is_in_the_training_text(corpus):
    training = {
        corpus.normalise(prompt)
        for document in itertools.islice(corpus.documents(5), 4000)
        for prompt in document.prompts
    }
    held_out = [
        corpus.normalise(document.prompts[0]) for document in itertools.islice(corpus.documents(5, held_out=True), 300)
    ]
    assert len(set(held_out)) > 100
    assert not training & set(held_out)


def test_templates_leave_no_marks_behind(corpus):
    for document in itertools.islice(corpus.documents(9), 1000):
        for message in document.messages:
            assert not set(message.content) & set("{}|#$^"), message.content
            assert "  " not in message.content, message.content
