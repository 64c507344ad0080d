"""What an API process makes of the configuration that an engine elsewhere tells it."""

from dataclasses import replace
from pathlib import Path

import pytest

from rustvllm.config.engine_args import AsyncEngineArgs
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.process.config_json import dump_info, load_config
from rustvllm.server.api_process import localise


def engine_config(**changes):
    config = AsyncEngineArgs(executor="sim").create_engine_config()
    return replace(config, model=replace(config.model, **changes))


def test_info_is_the_configuration_without_the_models_own():
    config = engine_config(served_model_name=("a", "b"))
    read = load_config(dump_info(config))
    assert dict(read.model.hf_config) == {}
    assert config.model.hf_config
    assert read.model.served_model_name == ("a", "b")
    assert read.model.tokenizer_path == config.model.tokenizer_path
    assert read.scheduler == config.scheduler


def test_info_that_is_too_long_says_so():
    with pytest.raises(ConfigError, match="at most 65536"):
        dump_info(engine_config(served_model_name=tuple(f"name-{index}" for index in range(10000))))


def test_info_of_another_release_names_the_field():
    text = dump_info(engine_config()).decode().replace('"max_num_seqs"', '"max_num_sequences"')
    with pytest.raises(ConfigError, match="max_num_sequences"):
        load_config(text)


def test_a_tokenizer_that_is_here_stays_and_names_may_change(tmp_path):
    config = engine_config()
    assert localise(config, None, None) == config
    assert localise(config, None, ["mine"]).model.served_model_name == ("mine",)
    assert localise(config, str(tmp_path), None).model.tokenizer_path == tmp_path
    without = engine_config(tokenizer_path=None)
    assert localise(without, None, None).model.tokenizer_path is None


def test_a_tokenizer_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elsewhere = engine_config(tokenizer_path=Path("/elsewhere/model"), model="/elsewhere/model")
    with pytest.raises(ModelLoadError, match=r"/elsewhere/model, which is not on this machine.*--tokenizer"):
        localise(elsewhere, None, None)
    # By its name the model is here after all.
    named = engine_config(tokenizer_path=Path("/elsewhere/assets"))
    assert localise(named, None, None).model.tokenizer_path == engine_config().model.tokenizer_path
