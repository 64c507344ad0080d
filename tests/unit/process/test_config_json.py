"""A configuration sent to another process arrives unchanged; invalid JSON is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from rustvllm.config import CacheConfig, EngineConfig, LoadConfig, ModelConfig, SchedulerConfig, SimConfig
from rustvllm.config.engine_args import EngineArgs
from rustvllm.exceptions import ConfigError
from rustvllm.process.config_json import dump_config, load_config


def small_config() -> EngineConfig:
    model = ModelConfig(
        model="näme",
        path=Path("/somewhere/mödel"),
        architecture="GPT2LMHeadModel",
        max_model_len=64,
        vocab_size=100,
        hidden_size=8,
        num_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        head_dim=4,
        eos_token_ids=(1, 2),
        hf_config={"nested": {"list": [1, 2.5, None]}},
        served_model_name=("a", "b"),
    )
    return EngineConfig(
        model=model,
        cache=CacheConfig(num_gpu_blocks_override=40, swap_space=1.5),
        scheduler=SchedulerConfig(preemption_mode="swap", watermark=0.25),
        load=LoadConfig(load_format="dummy", download_dir=Path("/downloads")),
    )


def test_a_configuration_comes_back_as_it_was() -> None:
    config = small_config()
    assert load_config(dump_config(config)) == config


def test_the_configuration_of_the_embedded_model_comes_back_as_it_was() -> None:
    config = EngineArgs().create_engine_config()
    assert load_config(dump_config(config)) == config


def test_every_field_travels() -> None:
    config = dataclasses.replace(small_config(), sim=SimConfig())
    assert load_config(dump_config(config)) == config
    data = json.loads(dump_config(config))
    assert set(data) == {part.name for part in dataclasses.fields(EngineConfig)}
    for name, part in data.items():
        if isinstance(part, dict):
            assert set(part) == {field.name for field in dataclasses.fields(getattr(config, name))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["cache"].update(color="red"), "config.cache has no field 'color'"),
        (lambda data: data["cache"].update(block_size="16"), "config.cache.block_size must be int"),
        (lambda data: data["cache"].update(block_size=0), "block_size must be at least 1"),
        (lambda data: data["model"].update(path=None), "config.model.path must be str"),
        (lambda data: data.update(model=[]), "config.model must be dict"),
    ],
)
def test_nonsense_is_refused_by_name(change: object, message: str) -> None:
    data = json.loads(dump_config(small_config()))
    change(data)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        load_config(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="config"):
        load_config(text)
