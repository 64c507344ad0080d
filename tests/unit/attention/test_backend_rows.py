"""The rows of config/attention_backends say what the backends do."""

import re

import pytest
import torch

from rustvllm.attention.cpu_backend import CPU_DTYPES, CPUAttentionBackend
from rustvllm.attention.static_batch import StaticAttentionBackend
from rustvllm.attention.torch_backend import TorchAttentionBackend
from rustvllm.attention.triton_backend import TRITON_DTYPES, TritonAttentionBackend
from rustvllm.config import DEVICES, DTYPES, KV_CACHE_DTYPES
from rustvllm.config.attention_backends import BACKENDS

CLASSES = {"triton": TritonAttentionBackend, "cpu": CPUAttentionBackend, "torch": TorchAttentionBackend}


def test_every_row_has_a_backend_of_its_name():
    assert BACKENDS.keys() == CLASSES.keys()
    assert {name: backend.name for name, backend in CLASSES.items()} == {name: name for name in BACKENDS}


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_row_says_is_known(name):
    row = BACKENDS[name]
    assert row.devices
    assert set(row.devices) <= set(DEVICES)
    assert row.dtypes
    assert set(row.dtypes) <= set(DTYPES)
    assert set(row.cache_dtypes) <= set(KV_CACHE_DTYPES) - {"auto"}


@pytest.mark.parametrize("name", BACKENDS)
def test_graphs_are_where_a_static_batch_is_planned(name):
    assert BACKENDS[name].has_graphs == issubclass(CLASSES[name], StaticAttentionBackend)


@pytest.mark.parametrize(("name", "dtypes"), [("cpu", CPU_DTYPES), ("triton", TRITON_DTYPES)])
def test_dtypes_are_those_of_the_kernels(name, dtypes):
    assert {getattr(torch, dtype) for dtype in BACKENDS[name].dtypes} == set(dtypes)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_has_a_backend_for_every_dtype_and_one_that_is_batch_invariant(device):
    rows = [row for row in BACKENDS.values() if device in row.devices]
    assert {dtype for row in rows for dtype in row.dtypes} == set(DTYPES)
    assert any(row.is_batch_invariant for row in rows)


def test_the_guide_has_the_same_table(repository):
    page = (repository / "docs" / "adding-an-attention-backend.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| (\w+) \| (\w+) \|$", page, re.MULTILINE)
    yes = {True: "yes", False: "no"}
    assert cells == [
        (
            row.name,
            ", ".join(row.devices),
            ", ".join(row.dtypes),
            ", ".join(row.cache_dtypes) or "–",
            yes[row.is_batch_invariant],
            yes[row.has_graphs],
        )
        for row in BACKENDS.values()
    ]
