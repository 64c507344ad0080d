"""The scripts of ``benches/python`` have a tokenizer where there is no reference data, or say which one they need."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benches" / "python"))

import tokenizer_folder
from tiny_checkpoint import GPT2_IDS, write_gpt2_small

from rustvllm.config.hub import embedded_model_path


def test_reference_data_come_before_the_embedded_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_folder, "DATA", tmp_path)
    assert tokenizer_folder.tokenizer_folder("some") == embedded_model_path()
    (tmp_path / "some").mkdir()
    assert tokenizer_folder.tokenizer_folder("some") == embedded_model_path()
    (tmp_path / "some" / "tokenizer.json").touch()
    assert tokenizer_folder.tokenizer_folder("some") == tmp_path / "some"


def test_gpt2_small_has_its_shape_with_a_small_tokenizer(tmp_path):
    from safetensors import safe_open

    folder = write_gpt2_small(tmp_path / "model", embedded_model_path(), num_layers=1)
    with safe_open(folder / "model.safetensors", "numpy") as weights:
        assert weights.get_slice("wte.weight").get_shape() == [GPT2_IDS, 768]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"nowhere has no tokenizer\.json; name a folder that has GPT-2's"
    ):
        tokenizer_folder.folder_with_tokenizer(str(tmp_path / "nowhere"))
    assert tokenizer_folder.folder_with_tokenizer(str(embedded_model_path())) == embedded_model_path()


def test_a_script_that_needs_gpt2s_tokenizer_says_so(repository, tmp_path):
    command = [sys.executable, repository / "benches/python/speculation.py", "--text", "repeating"]
    done = subprocess.run([*command, "--tokenizer", tmp_path], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert f"{tmp_path} has no tokenizer.json" in done.stderr
