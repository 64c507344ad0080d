"""Conversations in ShareGPT's form: which are used, how long their answers are, and files that are none."""

import json

import pytest

from rustvllm.cli.bench.datasets.sharegpt import read_sharegpt
from rustvllm.config.hub import embedded_model_path
from rustvllm.exceptions import ConfigError

TOKENIZER = str(embedded_model_path())


def conversation(*texts):
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / "sharegpt.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write_file


def test_pairs_of_two_turns_in_an_order_of_the_seed(write):
    entries = [conversation(f"question {number}", f"answer {number}", "more") for number in range(20)]
    path = write([*entries, conversation("alone"), {}, [], conversation("", "x"), {"conversations": [1, 2]}])
    all_of_them = read_sharegpt(path, 100, 0, 7, None)
    assert sorted(all_of_them) == sorted((f"question {number}", 7) for number in range(20))
    assert read_sharegpt(path, 100, 0, 7, None) == all_of_them
    assert read_sharegpt(path, 100, 1, 7, None) != all_of_them
    assert read_sharegpt(path, 3, 0, 7, None) == all_of_them[:3]


def test_a_tokenizer_counts_answers_and_leaves_out_what_is_too_short_or_too_long(write):
    text = "Once upon a time there was a little girl."
    path = write(
        [conversation(text, text), conversation("a", text), conversation(text, "a"), conversation("w " * 5000, text)]
    )
    [(prompt, length)] = read_sharegpt(path, 100, 0, None, TOKENIZER)
    assert prompt == text
    assert 4 <= length <= len(text)
    assert sorted(read_sharegpt(path, 100, 0, 9, TOKENIZER)) == [(text, 9), (text, 9)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "must hold a list of conversations, not dict"),
        ("[]", "has no usable conversation of two turns"),
    ],
)
def test_files_that_are_none(write, content, message):
    with pytest.raises(ConfigError, match=message):
        read_sharegpt(write(content), 1, 0, 5, None)


def test_what_is_missing(write, tmp_path):
    with pytest.raises(ConfigError, match="needs --sharegpt-output-len N or --tokenizer FOLDER"):
        read_sharegpt(write([]), 1, 0, None, None)
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        read_sharegpt(str(tmp_path / "none.json"), 1, 0, 5, None)
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        read_sharegpt(write([]), 1, 0, None, str(tmp_path))
