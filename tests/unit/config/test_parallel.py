"""Which models so many ranks can hold, and what is said of the others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rustvllm.config import ParallelConfig
from rustvllm.config.engine_args import EngineArgs
from rustvllm.config.lora import LoRAConfig, check_adapters
from rustvllm.config.parallel import check_split
from rustvllm.exceptions import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "vocab_size": 99, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "width", "says"),
    [
        (8, 12, 12, 96, "does not divide the 12 attention heads; 1, 2, 3, 4, 6, 12 would"),
        (
            6,
            12,
            4,
            96,
            "and the 4 key and value heads do not match: one number must divide the other; 1, 2, 4, 12 would work",
        ),
        (4, 12, 4, 90, "does not divide the width of the MLP, 90; 1, 2, 3, 6 would work"),
    ],
)
def test_what_cannot_be_split_is_said_with_what_could(
    size: int, heads: int, kv_heads: int, width: int, says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_split(size, heads, kv_heads, {"intermediate_size": width})
    assert str(error.value) == f"tensor_parallel_size {size} (--tensor-parallel-size, -tp) {says}"


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 3), (2, 4), (4, 4), (12, 4), (12, 1), (3, 12)])
def test_ranks_hold_several_kv_heads_each_or_several_ranks_hold_one(size: int, kv_heads: int) -> None:
    check_split(size, 12, kv_heads, {})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"tensor_parallel_size": True}, r"tensor_parallel_size must be an integer, got True \(bool\)"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size must be at most 64, got 65"),
        (
            {"distributed_executor_backend": "ray", "tensor_parallel_size": 2, "nnodes": 2},
            "is ray, and Ray chooses the machines, but nnodes is 2",
        ),
        ({"nnodes": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "the 4 ranks .+; 1, 2, 4 would"),
        ({"nnodes": 0}, "nnodes must be at least 1, got 0"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "node_rank is 2, but nnodes is 2"),
        ({"node_rank": -1}, "node_rank must be at least 0, got -1"),
        ({"master_port": 65536}, "master_port must be at most 65535, got 65536"),
        ({"master_addr": ""}, "master_addr must be the host name or address of the head node, got ''"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "nnodes 2 and data_parallel_size 2"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "uni, which runs one rank"),
        ({"distributed_executor_backend": "external_launcher"}, "not supported yet: rustvllm starts all ranks itself"),
        ({"distributed_executor_backend": "mpi"}, "must be one of uni, mp, ray, got 'mpi'"),
        ({"distributed_executor_backend": object}, "does not accept executor classes"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "uni, which runs one rank"),
        ({"distributed_timeout_seconds": 0.5}, "must be between 1 and 86400 seconds, got 0.5"),
    ],
)
def test_sizes_and_backends_out_of_range(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ParallelConfig(**options)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def args(folder: str, **options: Any) -> EngineArgs:
    return EngineArgs(model=folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", **options)


def test_gpus_that_share_a_model_take_no_adapters() -> None:
    config: Any = SimpleNamespace(
        model=SimpleNamespace(model_impl="rustvllm", pooler=None, served_model_name=("m",), model="m"),
        device=SimpleNamespace(device="cuda"),
        parallel=SimpleNamespace(num_ranks=2),
    )
    with pytest.raises(ConfigError, match="2 processes share the model: so far, adapters only run on one GPU"):
        check_adapters(config, LoRAConfig())
    config.parallel.num_ranks = 1
    check_adapters(config, LoRAConfig())


def test_several_ranks_are_asked_for(folder: str) -> None:
    assert args(folder).create_engine_config().parallel == ParallelConfig()
    config = args(folder, tensor_parallel_size=2, distributed_executor_backend="mp").create_engine_config()
    assert config.parallel.num_sharers == 2
    apart = args(folder, tensor_parallel_size=2, nnodes=2, master_addr="10.0.0.1").create_engine_config().parallel
    assert (apart.ranks_per_node, apart.num_sharers) == (1, 1), "each machine's processors are its own rank's"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {
                "enable_lora": True,
                "pipeline_parallel_size": 2,
                "tensor_parallel_size": 1,
                "hf_overrides": {"num_hidden_layers": 2},
            },
            "enable_lora: an adapter's layers would be in several stages",
        ),
        ({"executor": "sim"}, "executor=sim, which has no ranks"),
        ({"tensor_parallel_size": 5}, "does not divide the 12 attention heads"),
    ],
)
def test_what_does_not_go_together_is_named(folder: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        args(folder, **{"tensor_parallel_size": 2, **options}).create_engine_config()
