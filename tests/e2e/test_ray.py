"""Ranks that a local Ray cluster places give the tokens of one process; without Ray or room the start says so."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rank_engines import SMALL, executor_of, mixed_params, prompts, tokens
from rustvllm import LLM
from rustvllm.exceptions import ConfigError, ModelLoadError

BY_RAY: dict[str, Any] = {**SMALL, "distributed_executor_backend": "ray", "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two processors on this machine."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rustvllm[ray]'")
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_ranks_that_ray_places_give_the_tokens_of_one_process(cluster: Any) -> None:
    with LLM(**SMALL) as alone:
        expected = tokens(alone, mixed_params(), prompts(8))
    assert len({str(each) for each in expected}) > 3, "output that is all the same proves nothing"
    with LLM(**BY_RAY) as llm:
        views = executor_of(llm).rank_views()
        assert [(view.rank, view.node_rank) for view in views] == [(0, 0), (1, 1)]
        rank = psutil.Process(views[1].pid)
        parents = [parent.pid for parent in rank.parents()]
        assert psutil.Process(rank.ppid()).name().startswith("ray::"), "no actor started the rank"
        assert os.getpid() not in parents[:1]
        assert cluster.available_resources().get("CPU", 0) == 0, "a place for each rank"
        assert tokens(llm, mixed_params(), prompts(8)) == expected
    assert not psutil.wait_procs([rank], timeout=10)[1]


def test_what_cannot_be_placed_is_refused_with_what_was_asked_and_what_there_is(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rustvllm.executor.ray.PLACE_SECONDS", 3.0)
    with pytest.raises(ModelLoadError) as error:
        LLM(**{**BY_RAY, "tensor_parallel_size": 4})
    assert "no place for 4 ranks of 1 CPU each within 3 s: the cluster has 2 CPUs and 0 GPUs, of which" in str(
        error.value
    )


def test_without_ray_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray cannot be imported .+: pip install 'rustvllm\[ray\]'"):
        LLM(**BY_RAY)
