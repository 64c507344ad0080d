"""Stored tensors read into every kind of target, against what safetensors itself reads."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rustvllm.byte_progress import ByteProgress
from rustvllm.exceptions import ModelLoadError
from rustvllm.model_loader.checkpoint import read_headers
from rustvllm.model_loader.reading import TensorReader

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(), (1,), (7,), (0, 3), (3, 0), (1, 50), (5, 4), (3, 2, 4)]


@pytest.fixture
def folder(tmp_path):
    def write(tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


def silent():
    return ByteProgress("loading", "m", is_shown=False)


def targets(shape, dtype):
    """Empty tensors of a shape: contiguous; a part of a fused one; turned; with gaps."""
    yield torch.full(shape, -7.0, dtype=dtype)
    if shape:
        yield torch.full((shape[0] + 3, *shape[1:]), -7.0, dtype=dtype)[2 : 2 + shape[0]]
        yield torch.full((*shape, 2), -7.0, dtype=dtype)[..., 1]
    if len(shape) >= 2:
        turned = torch.full((*shape[:-2], shape[-1], shape[-2]), -7.0, dtype=dtype)
        yield turned.transpose(-1, -2)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffer_bytes", [1, 48, 1 << 20])
def test_every_layout_and_type(folder, stored, wanted, buffer_bytes):
    tensors = {f"t{i}": torch.randn(shape).to(stored) for i, shape in enumerate(SHAPES)}
    headers = read_headers(folder(tensors))
    count = 0
    with TensorReader(silent(), buffer_bytes) as reader:
        for name, tensor in tensors.items():
            for target in targets(tensor.shape, wanted):
                reader.read_into(headers[name], target)
                assert torch.equal(target, tensor.to(wanted))
                assert reader.equals(headers[name], target)
                if target.numel():
                    target[(-1,) * target.dim()] += 1
                    assert not reader.equals(headers[name], target)
                count += 1
    assert count > 20


def test_nothing_outside_the_target_is_written(folder):
    headers = read_headers(folder({"a": torch.ones(4, 3)}))
    whole = torch.zeros(8, 3)
    with TensorReader(silent()) as reader:
        reader.read_into(headers["a"], whole[2:6])
    assert whole.sum(1).tolist() == [0, 0, 3, 3, 3, 3, 0, 0]


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_file_that_becomes_shorter_while_it_is_read(folder, wanted):
    path = folder({"a": torch.ones(100, 10)})
    headers = read_headers(path)
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 40)
    with TensorReader(silent()) as reader, pytest.raises(ModelLoadError) as caught:
        reader.read_into(headers["a"], torch.empty(100, 10, dtype=wanted))
    assert "ended within tensor 'a', 40 bytes early" in str(caught.value)
    file.unlink()
    with TensorReader(silent()) as reader, pytest.raises(ModelLoadError, match="cannot be opened"):
        reader.read_into(headers["a"], torch.empty(100, 10, dtype=wanted))


def num_open():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_reader_leaves_no_file_open(folder):
    headers = read_headers(folder({"a": torch.ones(3)}))
    before = num_open()
    with TensorReader(silent()) as reader:
        reader.read_into(headers["a"], torch.empty(3))
        assert num_open() == before + 1
    assert num_open() == before
