"""Compares tokenizers from GGUF files, line by line, with the ones that the files were made from."""

import json
import os
import random

import gguf
import pytest

from gguf_files import write_tokenizer
from rustvllm import _core
from rustvllm.exceptions import ModelLoadError
from rustvllm.text.tokenizer import Tokenizer, read_chat_templates

NUM_LINES = int(os.environ.get("RUSTVLLM_TEST_LINES", "10000"))
pytestmark = pytest.mark.timeout(max(120, NUM_LINES // 100))
ODD = [
    "'s",
    "'LL",
    "123456",
    "…",
    "é",
    "e\u0301",
    "日本",
    "🙂",
    "  ",
    "\t",
    "\r\n",
    "<s>",
    "</s>",
    "<|endoftext|>",
    "\x00",
    "ﬁ",
]


@pytest.fixture(scope="module")
def lines(shared_dir):
    """Lines of the corpora, a third of them with unusual characters inserted, from a fixed seed."""
    rng = random.Random(0)
    texts = [path.read_text(encoding="utf-8") for path in sorted((shared_dir / "data/corpora").rglob("*.txt"))]
    found = [line for text in texts for line in text.splitlines()]
    chosen = rng.sample(found, min(NUM_LINES, len(found)))
    assert len(chosen) >= 10_000
    with_odd = [*range(0, len(chosen), 3), *range(len(chosen), NUM_LINES)]  # where lines are used again, all of them
    chosen += rng.choices(found, k=NUM_LINES - len(chosen))
    for i in with_odd:
        at = rng.randrange(len(chosen[i]) + 1)
        chosen[i] = chosen[i][:at] + rng.choice(ODD) + rng.choice(ODD) + chosen[i][at:]
    return chosen


def write(path, folder, pre, *, arch="llama", **options):
    writer = gguf.GGUFWriter(path, arch)
    write_tokenizer(writer, folder, pre, **options)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.from_folder(path)


def assert_equal(ours, original, lines):
    assert ours.vocab_size == original.vocab_size
    seen = set()
    for line in lines:
        ids = original.encode(line)
        assert ours.encode(line) == ids, repr(line)
        assert ours.decode(ids) == original.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        seen.update(ids)
    assert len(seen) > min(200, original.vocab_size // 3), "the lines use too few tokens to say anything"


@pytest.mark.parametrize(
    ("folder", "pre"),
    [
        ("stories260K/hf", None), ("modern-tokenizers/phi-3-mini", None), ("modern-tokenizers/minimind", "gpt-2"),
        ("gpt2-tokenizer", "gpt-2"),
    ],
)  # fmt: skip
def test_equals_the_original(folder, pre, lines, shared_dir, tmp_path):
    folder = shared_dir / "data" / folder
    arch = "phi3" if "phi-3" in folder.name else "llama"
    assert_equal(write(tmp_path / "t.gguf", folder, pre, arch=arch), Tokenizer.from_folder(folder), lines)


def test_qwen2_cuts_as_transformers_does(lines, shared_dir, tmp_path):
    import transformers

    source = shared_dir / "data/gpt2-tokenizer"
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in content["merges"]]
    transformers.Qwen2Tokenizer(vocab=content["vocab"], merges=merges).save_pretrained(tmp_path / "qwen2")
    ours = write(tmp_path / "t.gguf", tmp_path / "qwen2", "qwen2")
    assert_equal(ours, Tokenizer.from_folder(tmp_path / "qwen2"), lines[: NUM_LINES // 5])
    assert ours.encode("12") != write(tmp_path / "g.gguf", source, "gpt-2").encode("12"), "digits stand alone"


def test_llama3_cuts_as_transformers_converter_does(lines, shared_dir, tmp_path):
    import inspect

    from transformers.convert_slow_tokenizer import TikTokenConverter

    regex = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    assert regex is not None
    source = shared_dir / "data/gpt2-tokenizer"
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, level]}
    content["model"]["ignore_merges"] = True
    (tmp_path / "llama3").mkdir()
    (tmp_path / "llama3/tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    ours = write(tmp_path / "t.gguf", tmp_path / "llama3", "llama-bpe")
    assert_equal(ours, Tokenizer.from_folder(tmp_path / "llama3"), lines[: NUM_LINES // 5])


def test_gpt_4o_cuts_as_transformers_does(lines, shared_dir, tmp_path):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    source = shared_dir / "data/gpt2-tokenizer"
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    cut = {"type": "Split", "pattern": {"Regex": GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut | {"invert": False}, level]}
    (tmp_path / "gpt-4o").mkdir()
    (tmp_path / "gpt-4o/tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    ours = write(tmp_path / "t.gguf", tmp_path / "gpt-4o", "gpt-4o")
    assert_equal(ours, Tokenizer.from_folder(tmp_path / "gpt-4o"), lines[: NUM_LINES // 5])
    assert ours.encode("aBCd'll/\n") != write(tmp_path / "l.gguf", source, "llama-bpe").encode("aBCd'll/\n")


def test_special_tokens_and_template_come_along(shared_dir, tmp_path):
    folder = shared_dir / "data/modern-tokenizers/minimind"
    ours, original = write(tmp_path / "t.gguf", folder, "gpt-2"), Tokenizer.from_folder(folder)
    assert original.chat_template
    assert ours.chat_template == original.chat_template
    assert (ours.bos_token, ours.eos_token) == (original.bos_token, original.eos_token)
    ids = original.encode("<|im_start|>a<|im_end|>")
    assert ours.decode(ids) == original.decode(ids) == "a"


def refusal(path):
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_folder(path)
    return str(caught.value)


def tokenizer_file(path, *, model="gpt2", pre="gpt-2", tokens=("a", "b", "ab"), merges=("a b",), types=None):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_merges(list(merges))
    if types is not None:
        writer.add_token_types(types)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "bert"}, "'bert'; supported: llama (SentencePiece) and gpt2 (BPE)"),
        ({"pre": "chameleon"}, "'chameleon'; supported: gpt-2, gpt-4o, llama-bpe, qwen2"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"tokens": ("a", "a")}, "the tokens 0 and 1 are both 'a'"),
        ({"merges": ("a c",)}, "the merge 'a c'"),
        ({"merges": ("a",)}, "the merge 'a'"),
        ({"types": [1]}, "3 tokens have 1 types"),
        ({"model": "llama"}, "3 tokens have 0 scores"),
    ],
)
def test_what_is_not_read_is_refused_by_name(options, says, tmp_path):
    message = refusal(tokenizer_file(tmp_path / "t.gguf", **options))
    assert says in message
    assert "--tokenizer" in message


def test_a_right_one_is_read(tmp_path):
    tokenizer = Tokenizer.from_folder(tokenizer_file(tmp_path / "t.gguf"))
    assert tokenizer.encode("abba") == [2, 1, 0]
    assert isinstance(tokenizer.core, _core.Tokenizer)


def test_the_template_for_tools_comes_along(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_chat_template([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    templates = read_chat_templates(tmp_path / "t.gguf")
    assert (templates.default, templates.tool_use) == ("D", "T")
