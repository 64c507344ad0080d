"""Where a ``tokenizer.json`` comes from. The converter is replaced by a script, except where its result is compared."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rustvllm import _core
from rustvllm.exceptions import ModelLoadError
from rustvllm.text import tokenizer_json
from rustvllm.text.tokenizer_json import load_tokenizer_json

CONVERTED = '{"converted": true}'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("RUSTVLLM_CACHE", str(folder))
    return folder / "tokenizers"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    return folder


@pytest.fixture
def converter(tmp_path, monkeypatch, cache):
    """Replace the converter by a shell script; ``$3`` is the folder, ``$4`` the class and ``$5`` the target."""
    script, calls = tmp_path / "converter", tmp_path / "calls"

    def write(body=f"printf %s '{CONVERTED}' > \"$5\"; echo '{{\"ok\": true}}'"):
        script.write_text(f'#!/bin/sh\necho "$4" >> {calls}\n{body}\n')
        script.chmod(0o700)

    write()
    # Only this module's view of it.
    monkeypatch.setattr(tokenizer_json, "sys", SimpleNamespace(executable=str(script)))
    return SimpleNamespace(write=write, calls=lambda: calls.read_text().split() if calls.exists() else [])


def read(path):
    text = path.read_text()
    if not text.startswith("{"):
        raise ValueError("no JSON")
    return text


def test_a_tokenizer_json_is_read_where_it_is(model, converter):
    (model / "tokenizer.json").write_text('{"own": 1}')
    assert load_tokenizer_json(model, read) == '{"own": 1}'
    assert converter.calls() == []


def test_a_conversion_is_kept_for_this_user_alone(model, converter, cache):
    assert load_tokenizer_json(model, read) == CONVERTED
    assert load_tokenizer_json(model, read) == CONVERTED
    assert converter.calls() == ["GPT2Tokenizer"]
    [kept] = cache.iterdir()
    assert (kept.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer_config.json", "added_tokens.json"])
def test_other_files_are_another_conversion(model, converter, name):
    load_tokenizer_json(model, read)
    (model / name).write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    load_tokenizer_json(model, read)
    assert len(converter.calls()) == 2


def test_a_cached_file_that_was_cut_is_made_again(model, converter, cache):
    load_tokenizer_json(model, read)
    [kept] = cache.iterdir()
    kept.write_text("")
    assert load_tokenizer_json(model, read) == CONVERTED
    assert (len(converter.calls()), kept.read_text()) == (2, CONVERTED)


@pytest.mark.parametrize("state", ["a file", "open to others"])
def test_without_a_cache_of_its_own_nothing_is_kept(model, converter, cache, state):
    if state == "a file":
        cache.parent.write_text("in the way")
    else:
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    for _ in range(2):
        assert load_tokenizer_json(model, read) == CONVERTED
    assert len(converter.calls()) == 2
    assert state == "a file" or list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "config", "name"),
    [
        (["vocab.json", "merges.txt"], None, "GPT2Tokenizer"),
        (["tokenizer.model"], None, "LlamaTokenizer"),
        (["tokenizer.model", "vocab.json"], {"tokenizer_class": "PreTrainedTokenizerFast"}, "LlamaTokenizer"),
        (["vocab.txt"], None, "BertTokenizer"),
        (["tokenizer.model"], {"tokenizer_class": "GemmaTokenizerFast"}, "GemmaTokenizerFast"),
        (["vocab.json", "merges.txt"], {"tokenizer_class": 5}, "GPT2Tokenizer"),
    ],
)
def test_the_class(tmp_path, converter, files, config, name):
    folder = tmp_path / "other"
    folder.mkdir()
    for file in files:
        (folder / file).write_text("")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    load_tokenizer_json(folder, read)
    assert converter.calls() == [name]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('echo \'{"error": "ValueError: no such file"}\'; exit 1', "ValueError: no such file"),
        ("exit 3", "ended with code 3"),
        ("echo oops >&2; exit 3", "ended with code 3; oops"),
        ("kill -9 $$", "ended by SIGKILL"),
        ("echo nonsense", "ended with code 0"),
        ("echo '[1]'", "ended with code 0"),
        ("echo '{\"ok\": 0}'", "without a word"),
    ],
)
def test_a_conversion_that_fails(model, converter, cache, body, message):
    converter.write(body)
    with pytest.raises(ModelLoadError, match="GPT2Tokenizer") as error:
        load_tokenizer_json(model, read)
    for part in (message, str(model), "merges.txt, vocab.json", "skip_tokenizer_init"):
        assert part in str(error.value)
    assert list(cache.iterdir()) == []  # nothing half made
    converter.write()
    assert load_tokenizer_json(model, read) == CONVERTED


def test_a_conversion_that_does_not_end(model, converter, cache, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "CONVERSION_TIMEOUT", 0.2)
    converter.write("exec sleep 600")
    with pytest.raises(ModelLoadError, match="took longer than"):
        load_tokenizer_json(model, read)
    assert list(cache.iterdir()) == []


def test_a_converter_that_cannot_be_started(model, converter, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "sys", SimpleNamespace(executable="/nonexistent/python"))
    with pytest.raises(ModelLoadError, match="could not be started"):
        load_tokenizer_json(model, read)


def test_files_that_are_too_large(model, converter, monkeypatch):
    monkeypatch.setattr(tokenizer_json, "MAX_FILE_BYTES", 10)
    (model / "merges.txt").write_text("x" * 11)
    with pytest.raises(ModelLoadError, match=r"merges.txt has 11 bytes"):
        load_tokenizer_json(model, read)
    assert converter.calls() == []


def test_no_files_at_all(tmp_path):
    with pytest.raises(ModelLoadError, match=r"neither tokenizer.json nor .*skip_tokenizer_init"):
        load_tokenizer_json(tmp_path, read)


TEXTS = ["Hello, my name is", " leading", "日本語 🙂 é", "a\n\n\tb", "Once upon a time", "x" * 300]


def core(path):
    return _core.Tokenizer.from_file(str(path))


@pytest.mark.slow
def test_gpt2_converted_is_gpt2(shared_dir, tmp_path, cache):
    from transformers import GPT2Tokenizer

    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared_dir / "data/gpt2-tokenizer" / name, tmp_path)
    ours, theirs = load_tokenizer_json(tmp_path, core), GPT2Tokenizer.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


@pytest.mark.slow
def test_sentencepiece_converted_is_sentencepiece(shared_dir, tmp_path, cache):
    if not all(map(tokenizer_json._is_installed, ("sentencepiece", "google.protobuf"))):
        pytest.skip("transformers needs sentencepiece and protobuf to read tokenizer.model")
    from transformers import LlamaTokenizer

    shutil.copy(shared_dir / "data/stories260K/hf/tokenizer.model", tmp_path)
    ours, theirs = load_tokenizer_json(tmp_path, core), LlamaTokenizer.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CTRLTokenizer", "has no fast version; classes that have one include GPT2Tokenizer"),
        ("NoSuchTokenizer", "is not a class of transformers"),
        ("BertTokenizer", r"BertTokenizer needs vocab.txt, but vocab.txt is missing"),
        ("GPT2Tokenizer", "cannot convert the tokenizer"),
        ("AutoConfig", "has no fast version"),
    ],
)
def test_classes_that_cannot_be_converted(model, cache, name, message):
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    (model / "vocab.json").write_text("no JSON")
    with pytest.raises(ModelLoadError, match=message) as error:
        load_tokenizer_json(model, core)
    assert name in str(error.value)


@pytest.mark.slow
def test_the_process_that_asks_stays_free_of_torch(shared_dir, tmp_path, cache):
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared_dir / "data/gpt2-tokenizer" / name, tmp_path)
    program = (
        "import sys, pathlib\n"
        "from rustvllm.text.tokenizer import Tokenizer\n"
        f"print(Tokenizer.from_folder(pathlib.Path({str(tmp_path)!r})).encode('Hello'))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split("\n")[:2] == ["[15496]", "[]"]
