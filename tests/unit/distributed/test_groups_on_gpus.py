"""Collectives over tensors of a CUDA device: NCCL with one rank, gloo with two that share the device."""

import subprocess
import sys
import textwrap

import pytest
import torch

from rustvllm.distributed import rendezvous

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def test_nccl_with_one_rank_gives_back_what_it_got() -> None:
    store = rendezvous.open_store(1, 60.0)
    group = rendezvous.make_group(store, 0, 1, CUDA, 60.0)
    assert group.group is not None, "without a group nothing is asked of NCCL"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.arange(12, device=CUDA, dtype=dtype).view(3, 4)
        assert torch.equal(group.all_reduce(tensor.clone()), tensor)
        assert torch.equal(group.all_gather(tensor), tensor[None])
        assert torch.equal(group.broadcast(tensor.clone()), tensor)
        gathered = group.gather(tensor)
        assert gathered is not None
        assert torch.equal(gathered, tensor[None])
    assert group.time.calls == 12


SCRIPT = textwrap.dedent("""
    import sys
    import torch
    from rustvllm.distributed import rendezvous
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = rendezvous.join_store(port, 2, 60.0)
    cuda = torch.device("cuda", 0)
    group = rendezvous.make_group(store, rank, 2, cuda, 60.0, by_gloo=True)
    own = torch.arange(6, device=cuda, dtype=torch.float32) * (rank + 1)
    gathered = group.all_gather(own)
    assert gathered.is_cuda and gathered.tolist() == [[i * k for i in range(6)] for k in (1, 2)]
    first = group.gather(own)
    assert (first is None) == (rank == 1)
    assert group.broadcast(own.clone()).tolist() == [float(i) for i in range(6)]
    assert group.all_reduce(own).tolist() == [3.0 * i for i in range(6)]
    print("done", group.time.calls)
""")


def test_gloo_carries_cuda_tensors_between_two_ranks() -> None:
    store = rendezvous.open_store(2, 60.0)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(store.port)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert out == "done 4\n", errors
