"""Facts that ranks compare before they load: every file's header counts, and a difference names both values."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rustvllm.distributed.facts import difference, model_fingerprint, rank_facts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"head" + b"numbers")
    return tmp_path


def test_a_fingerprint_is_of_configuration_index_and_headers(folder: Path) -> None:
    first = model_fingerprint(folder)
    assert first == model_fingerprint(folder)
    assert len(first) == 16
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7] + b"NUMBERS")
    assert model_fingerprint(folder) == first, "weights themselves are not read"
    seen = {first}
    weights.write_bytes(whole.replace(b"head", b"HEAD"))
    seen.add(model_fingerprint(folder))
    weights.write_bytes(whole + b"more")
    seen.add(model_fingerprint(folder))
    weights.write_bytes(whole)
    (folder / "config.json").write_text('{"a": 1}')
    seen.add(model_fingerprint(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    seen.add(model_fingerprint(folder))
    assert len(seen) == 5


def test_a_header_that_says_too_much_and_a_folder_without_files(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 9)
    assert len(model_fingerprint(folder)) == 16
    assert model_fingerprint(folder / "gone") != model_fingerprint(folder)
    assert model_fingerprint(folder / "config.json") != model_fingerprint(folder / "model.safetensors")


def test_files_of_merged_adapters_count_whole_and_for_ranks_alone(folder: Path) -> None:
    (folder / "adapter").mkdir()
    weights = folder / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(b"numbers")
    config: Any = SimpleNamespace(
        model=SimpleNamespace(path=folder), load=SimpleNamespace(merge_lora=(str(folder / "adapter"),))
    )
    first = rank_facts(config)
    assert rank_facts(config) == first
    weights.write_bytes(b"Numbers")
    said = difference(rank_facts(config), first, 1)
    assert said is not None
    assert "worker rank 1 has another fingerprint of the files of --merge-lora than rank 0" in said


def test_files_of_merged_adapters_are_never_whole_in_memory(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("wb") as weights:
        weights.truncate(64 << 20)
    config: Any = SimpleNamespace(model=SimpleNamespace(path=folder), load=SimpleNamespace(merge_lora=(str(folder),)))
    tracemalloc.start()
    try:
        rank_facts(config)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 << 20


def test_a_difference_names_both_values() -> None:
    theirs = {"torch": "2.15", "model": "aa"}
    assert difference(theirs, theirs, 1) is None
    assert difference({"torch": "2.14", "model": "aa"}, theirs, 3) == (
        "worker rank 3 has another torch than rank 0: 2.14 and 2.15; use the same installation and model for all ranks"
    )
    said = difference({"torch": "2.15", "model": "bb"}, theirs, 1)
    assert said is not None
    assert "another the model's files (fingerprint)" not in said
    assert "bb and aa" in said
