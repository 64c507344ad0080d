"""``import rustvllm``: names that come when they are asked for."""

import pytest

import rustvllm


def test_a_core_older_than_the_sources_is_what_the_error_is_about(monkeypatch):
    monkeypatch.delitem(rustvllm.__dict__, "LLM", raising=False)

    def import_module(name):
        raise AttributeError(f"module 'rustvllm._core' has no attribute 'New' (in {name})")

    monkeypatch.setattr(rustvllm, "import_module", import_module)
    with pytest.raises(ImportError, match=r"rustvllm\.llm cannot be imported: .*'New'.*make setup"):
        _ = rustvllm.LLM


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="module 'rustvllm' has no attribute 'LLLM'"):
        _ = rustvllm.LLLM


def test_every_name_is_there():
    assert all(hasattr(rustvllm, name) for name in rustvllm.__all__)
    assert set(rustvllm.__all__) <= set(dir(rustvllm))


@pytest.mark.parametrize("name", ["ModelRegistry", "initialize_ray_cluster"])
def test_names_of_vllm_that_are_not_built_say_so(name):
    with pytest.raises(ImportError, match=f"{name} is not supported yet: "):
        getattr(rustvllm, name)
    with pytest.raises(ImportError, match=f"{name} is not supported yet: "):
        exec(f"from rustvllm import {name}")
