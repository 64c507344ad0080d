"""Compares the tokenizer with transformers', and tests how it reads each configuration file of a model folder."""

import json
import shutil

import pytest

from rustvllm.exceptions import InvalidRequestError, ModelLoadError
from rustvllm.server.flags.serve_args import read_chat_template
from rustvllm.text.tokenizer import Tokenizer

FOLDERS = [
    "gpt2-tokenizer",
    "stories260K/hf",
    "slm4096-gpt2/hf",
    "modern-tokenizers/minimind",
    "modern-tokenizers/phi-3-mini",
]
TEXTS = [
    "Hello, my name is",
    " leading space",
    "日本語 🙂🏽 é",
    "a\n\n\tb",
    "",
    "<s></s><|endoftext|><|im_end|>",
    "x" * 3000,
]


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request, shared_dir):
    """The same tokenizer, as rustvllm's object and as transformers'."""
    import transformers

    folder = shared_dir / "data" / request.param
    return Tokenizer.from_folder(folder), transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:20])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encodes_like_transformers(pair, text, add_special_tokens):
    ours, theirs = pair
    assert ours.encode(text, add_special_tokens) == theirs.encode(text, add_special_tokens=add_special_tokens)


def test_special_tokens_are_those_of_transformers(pair):
    ours, theirs = pair
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "bos_token_id", "eos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.chat_template == theirs.chat_template
    assert len(ours) == len(theirs)


def test_gpt2(shared_dir):
    tokenizer = Tokenizer.from_folder(shared_dir / "data/gpt2-tokenizer")
    assert tokenizer.encode("Hello") == [15496]
    assert len(tokenizer.encode("Hello, my name is")) == 5
    assert tokenizer("Hello") == {"input_ids": [15496]}
    assert tokenizer.decode([15496, 995]) == "Hello world"
    assert tokenizer.convert_ids_to_tokens([15496, 10**6]) == ["Hello", None]
    assert tokenizer.convert_tokens_to_ids("Hello") == 15496


@pytest.fixture
def folder(toy_model, tmp_path):
    shutil.copy(f"{toy_model}/tokenizer.json", tmp_path)

    def write(config=None, **files):
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)
        return tmp_path

    return write


def test_without_a_configuration(folder):
    tokenizer = Tokenizer.from_folder(folder())
    assert tokenizer.encode("ab") == [97, 98]
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.chat_template) == (None, None, None)


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({}, [97]),
        ({"add_bos_token": True}, [256, 97]),
        ({"add_eos_token": True}, [97, 256]),
        ({"add_bos_token": True, "add_eos_token": True}, [256, 97, 256]),
        ({"add_bos_token": False}, [97]),
    ],
)
def test_beginning_and_end(folder, flags, ids):
    special = {"bos_token": "<eos>", "eos_token": {"content": "<eos>", "special": True}}
    tokenizer = Tokenizer.from_folder(folder(special | flags))
    assert tokenizer.encode("a") == ids
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_a_beginning_that_is_not_there_is_not_added(folder):
    assert Tokenizer.from_folder(folder({"add_bos_token": True})).encode("a") == [97]
    assert Tokenizer.from_folder(folder({"add_bos_token": True, "bos_token": "<none>"})).encode("a") == [97]


@pytest.mark.parametrize(
    ("config", "files", "template"),
    [
        ({"chat_template": "T"}, {}, "T"),
        ({"chat_template": "T"}, {"chat_template__jinja": "F"}, "F"),
        ({}, {"chat_template__json": '{"chat_template": "J"}'}, "J"),
        ({"chat_template": [{"name": "default", "template": "D"}, {"name": "x", "template": "X"}]}, {}, "D"),
        ({"chat_template": [{"name": "x", "template": "X"}]}, {}, None),
        ({"chat_template": {"default": "D", "tool_use": "T"}}, {}, "D"),
        ({"chat_template": {"default": "D"}}, {"chat_template__jinja": "F"}, "F"),
        ({}, {"chat_template__json": '{"chat_template": {"default": "J"}}'}, "J"),
        ({"chat_template": {"x": "X", "tool_use": "T"}}, {}, None),
        ({"chat_template": {"default": 5}}, {}, None),
        ({"chat_template": [{"name": ["x"], "template": "X"}, 7, {"template": "Y"}]}, {}, None),
        ({"chat_template": 5}, {}, None),
        ({}, {}, None),
    ],
)
def test_chat_template(folder, config, files, template):
    assert Tokenizer.from_folder(folder(config, **files)).chat_template == template


def test_the_template_for_conversations_with_tools(folder):
    in_list = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    for named in (in_list, {"default": "D", "tool_use": "T"}):
        tokenizer = Tokenizer.from_folder(folder({"chat_template": named}))
        assert (tokenizer.chat_template, tokenizer.tool_template) == ("D", "T")
    place = folder({"chat_template": "D"}, chat_template__jinja="F")
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates/tool_use.jinja").write_text("U")
    tokenizer = Tokenizer.from_folder(place)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("F", "U")
    (place / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_folder(place)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("D", "U")


def test_a_byte_order_mark_is_no_part_of_a_template(folder):
    place = folder({}, chat_template__jinja="\ufeffF")
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates/tool_use.jinja").write_text("\ufeffU", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(place)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("F", "U")
    assert read_chat_template(str(place / "chat_template.jinja")) == "F"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"x": "X", "y": "Y"}, "no chat template is named default (there are: x, y); choose one with --chat-template"),
        ([], "no chat template is named default (there are: none)"),
        (5, "ignoring chat_template, which must be a string or named strings, not int"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_said(folder, caplog, template, says):
    Tokenizer.from_folder(folder({"chat_template": template}))
    assert says in caplog.text


def test_lone_surrogates(folder):
    tokenizer = Tokenizer.from_folder(folder())
    for encode in (tokenizer.encode, tokenizer.encode_ids):
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            encode("a\ud800")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", "null"])
def test_broken_files_are_named(folder, name, content):
    path = folder({})
    (path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_folder(path)


def test_no_tokenizer_at_all(tmp_path):
    with pytest.raises(ModelLoadError, match="skip_tokenizer_init=True"):
        Tokenizer.from_folder(tmp_path)
