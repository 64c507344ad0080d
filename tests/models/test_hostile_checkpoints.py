"""Whatever is done to a checkpoint's headers and configuration, it is loaded or refused with an error of ours.

GGUF files, and folders of AWQ, GPTQ and compressed-tensors: bytes of the headers, values of the configuration.
``RUSTVLLM_TEST_MUTATIONS`` is how many mutations of each there are; the header of GGUF alone is mutated more often in
``crates/gguf/tests/hostile.rs``.
"""

import copy
import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest
from checkpoints import LLAMA, make
from quantized_models import AWQ, GPTQ, compressed, write

from quantized_files import awq, gptq, packed
from rustvllm.cli import inspect as inspect_command
from rustvllm.config.checkpoint.quantized_folders import read_quantization
from rustvllm.config.hub import embedded_model_path
from rustvllm.config.model_folder import read_model_config
from rustvllm.exceptions import ModelLoadError, RustVLLMError
from rustvllm.model_loader.checkpoint import read_headers
from rustvllm.model_loader.gguf_tensors import read_gguf_headers
from rustvllm.model_loader.quantized_tensors import join_quantized
from rustvllm.text.tokenizer import Tokenizer

gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)
NUM_MUTATIONS = int(os.environ.get("RUSTVLLM_TEST_MUTATIONS", "150"))
pytestmark = pytest.mark.timeout(max(120, NUM_MUTATIONS // 20))
MOST_SECONDS = 1.0
MOST_BYTES = 100e6
ODD = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**63), 1e308, float("nan"), float("inf"), "", "x", "4",
    [], [1], {}, {"a": 1}, [[]], "\u0000", "9" * 5000, [None] * 50, {"bits": {}}, "marlin", "gptq", "fp8",
]  # fmt: skip
FORMATS = {
    "awq": (AWQ, awq, {}),
    "gptq": (GPTQ, gptq, {}),
    "compressed-tensors": (compressed("pack-quantized", bits=4, group_size=32), packed, {"symmetric": True}),
}


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def places(value, at=()):
    """Every place of a JSON document."""
    yield at
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*at, key))


def mutated_json(document, rng):
    """With some values changed, taken away, or put elsewhere."""
    changed = json.loads(json.dumps(document))
    for _ in range(rng.randint(1, 3)):
        *path, last = rng.choice([at for at in places(changed) if at])
        holder = changed
        for key in path:
            holder = holder[key]
        if rng.random() < 0.15 and isinstance(holder, dict):
            del holder[last]
        else:
            holder[last] = copy.deepcopy(rng.choice(ODD))
    return changed


def mutated_bytes(content, first, last, rng):
    """With some bytes of a range changed, or cut."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(first, last)
        changed[at] = rng.choice([rng.randrange(256), changed[at] ^ 1 << rng.randrange(8), 0xFF, 0])
    return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.1 else changed)


def outcome(read):
    """Whether it was read; an error that is not ours fails the test, as one that costs much does."""
    before, begin = resident(), time.thread_time()
    try:
        read()
    except RustVLLMError as error:
        assert str(error)  # noqa: PT017 -- every other error fails by itself
        return False
    finally:
        assert time.thread_time() - begin < MOST_SECONDS, "of a processor, whatever else runs on the machine"
        assert resident() - before < MOST_BYTES
    return True


def read_folder(folder):
    config = read_model_config(folder, model="m")
    stored, how = read_headers(folder), read_quantization(config.hf_config, folder)
    if how is not None:
        join_quantized(stored, how, folder, is_turned=False)
    inspect_command.describe(str(folder))


def read_file(path):
    read_model_config(path, model="m")
    read_gguf_headers(path)
    Tokenizer.from_folder(path)
    inspect_command.describe(str(path))


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    """What is read is not timed."""
    monkeypatch.setattr(inspect_command, "best_token_seconds", lambda *_: 0.0)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", read_headers),
        ("model.safetensors", lambda folder: inspect_command.describe(str(folder))),
        ("tokenizer.json", Tokenizer.from_folder),
        ("model.gguf", lambda folder: read_model_config(folder / "model.gguf", model="m")),
    ],
)
def test_a_pointer_of_git_lfs_is_named(name, read, tmp_path):
    shutil.copytree(embedded_model_path(), tmp_path / "model")
    file = tmp_path / "model" / name
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4321\n")
    with pytest.raises(ModelLoadError, match=rf"{name}.*is a pointer of git-lfs .*: run `git lfs pull` in its folder$"):
        read(file.parent)


@pytest.mark.parametrize("form", FORMATS)
def test_folders_are_read_or_refused(form, tmp_path):
    config, lay_out, options = FORMATS[form]
    write(tmp_path / "right", "llama", config, lay_out, **options)
    read_folder(tmp_path / "right")
    right = json.loads((tmp_path / "right/config.json").read_text())
    weights = (tmp_path / "right/model.safetensors").read_bytes()
    header_end = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:header_end])
    rng, read = random.Random(0), 0
    folder = tmp_path / "m"
    shutil.copytree(tmp_path / "right", folder)
    for number in range(NUM_MUTATIONS):
        config, content = right, weights
        if number % 3 == 0:
            quantization = mutated_json(right["quantization_config"], rng)
            config = right | {"quantization_config": quantization}
        elif number % 3 == 1:
            content = mutated_bytes(weights, 0, header_end, rng)
        else:
            text = json.dumps(mutated_json(header, rng)).encode()
            content = len(text).to_bytes(8, "little") + text + weights[header_end:]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(content)
        read += outcome(lambda: read_folder(folder))
    assert 0 < read < 0.9 * NUM_MUTATIONS, "nothing was refused, or everything"


def test_files_are_read_or_refused(tmp_path, shared_dir):
    path = tmp_path / "m.gguf"
    tokens = [*map(chr, range(97, 123)), "ab"]

    def metadata(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(["a b"])
        writer.add_chat_template("{{ messages }}")

    model = make("llama", LLAMA | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(tokens)})
    gguf_files.write_model(path, model, lambda _: "Q8_0", metadata=metadata)
    read_file(path)
    right = path.read_bytes()
    header_end = len(right) - sum(-(-p.numel() * (1 if p.dim() == 2 else 4) // 32) * 32 for p in model.parameters())
    rng, read = random.Random(0), 0
    for _ in range(NUM_MUTATIONS):
        path.write_bytes(mutated_bytes(right, 0, header_end // 2, rng))
        read += outcome(lambda: read_file(path))
    assert 0 < read < 0.9 * NUM_MUTATIONS, "nothing was refused, or everything"
