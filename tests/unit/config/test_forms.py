"""What ``rustvllm inspect`` counts of a folder is what would be loaded of it, and what cannot be loaded is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from rustvllm.config.checkpoint.forms import read_forms
from rustvllm.exceptions import ModelLoadError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    """Two shards with their index."""
    save_file({"a.weight": np.zeros((3, 4), np.float32)}, tmp_path / FIRST)
    save_file({"b.weight": np.zeros((5, 2), np.float16)}, tmp_path / SECOND)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a.weight": FIRST, "b.weight": SECOND}}))
    return tmp_path


def counted(folder):
    return {form.name: (form.num_parameters, form.num_bytes) for form in read_forms(folder)}


def test_other_files_than_those_of_the_index_do_not_count(folder):
    expected = {"a.weight": (12, 48), "b.weight": (10, 20)}
    assert counted(folder) == expected
    save_file({"a.weight": np.zeros((3, 4), np.float32), "x": np.zeros(99)}, folder / "model.safetensors")
    save_file({"other.weight": np.zeros(7)}, folder / "consolidated.safetensors")
    assert counted(folder) == expected
    (folder / INDEX).unlink()
    assert set(counted(folder)) == {"a.weight", "x"}, "the one file counts where there is no index"


def test_a_folder_that_cannot_be_loaded_is_not_counted(folder):
    save_file({"a.weight": np.zeros(2), "b.weight": np.zeros(2)}, folder / SECOND)
    with pytest.raises(ModelLoadError, match=rf"tensor 'a\.weight' is in {FIRST} and in {SECOND}"):
        read_forms(folder)
    (folder / SECOND).unlink()
    with pytest.raises(ModelLoadError, match=rf"1 of 2 shards named in .* are missing: {SECOND}; download"):
        read_forms(folder)
    (folder / INDEX).unlink()
    file = folder / FIRST
    file.write_bytes(file.read_bytes()[:-1])
    size = file.stat().st_size
    with pytest.raises(
        ModelLoadError, match=rf"it has {size} bytes, but its header describes {size + 1}; .* truncated"
    ):
        read_forms(folder)
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"has no \*\.safetensors files and is not a GGUF file"):
        read_forms(folder)
