"""``RankMeeting`` and the ``RankGroup`` over it, ranks as threads: what is added, gathered and refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rustvllm import _core
from rustvllm.distributed import meetings
from rustvllm.distributed.rank_group import RankGroup
from rustvllm.exceptions import SchedulerStateError

SECONDS = 60.0
CHANNEL = _core.StepWriter(1)


def groups_of(size):
    first = _core.RankMeeting(size, spin_us=20)
    meetings = [first] + [_core.RankMeeting.join(first.fileno(), rank, spin_us=20) for rank in range(1, size)]
    return [RankGroup(rank, size, torch.distributed.ProcessGroup(rank, size), False, one, SECONDS)
            for rank, one in enumerate(meetings)]  # fmt: skip


def by_all(groups, act):
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(act, groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 5), (3, 0), (40, 3000)])
def test_a_sum_is_that_of_all_ranks_in_their_order(dtype, shape):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    groups = groups_of(3)
    found = by_all(groups, lambda group: group.all_reduce(parts[group.rank].clone()))
    expected = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    for one in found:
        assert one.dtype == dtype
        assert torch.equal(one, expected)
    assert [group.time.calls for group in groups] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool])
def test_whatever_it_is_made_of_is_gathered_in_the_order_of_ranks(dtype):
    parts = [(torch.arange(2 * 70_000).reshape(2, -1) % (5 + rank)).to(dtype) for rank in range(2)]
    groups = groups_of(2)
    everywhere = by_all(groups, lambda group: group.all_gather(parts[group.rank].T))  # which is not contiguous
    for one in everywhere:
        assert torch.equal(one, torch.stack([part.T for part in parts]))
    first, second = by_all(groups, lambda group: group.gather(parts[group.rank]))
    assert torch.equal(first, torch.stack(parts))
    assert second is None


def test_a_rank_that_wants_something_else_is_named():
    def act(group):
        with pytest.raises(SchedulerStateError) as raised:
            group.all_reduce(torch.zeros(1 + group.rank))
        return str(raised.value)

    errors = by_all(groups_of(2), act)
    assert errors[0] == "rank 0 came to an all_reduce of 4 bytes, rank 1 to an all_reduce of 8"


def test_a_rank_that_does_not_come_is_named_and_giving_up_ends_the_wait():
    meeting = _core.RankMeeting(2)
    with pytest.raises(TimeoutError, match=r"^rank 1 has not come to an all_reduce within 0\.1 s$"):
        meeting.all_reduce(np.zeros(3, np.float32), 0.1)
    waiting = _core.RankMeeting(2)
    threading.Timer(0.1, waiting.give_up).start()
    with pytest.raises(SchedulerStateError, match="the ranks meet no more: one has ended"):
        waiting.all_reduce(np.zeros(3, np.float32), SECONDS)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda one: one.all_reduce(np.zeros(3), 1.0),
         "data must be an array of float32, or of bfloat16 seen as uint16"),
        (lambda one: one.all_reduce(np.zeros((4, 4), np.float32)[:, 1], 1.0), "data must be contiguous"),
        (lambda one: one.all_reduce(np.broadcast_to(np.float32(1), (1,)), 1.0), "data must be writable"),
        (lambda one: one.all_reduce(np.zeros(3, np.float32), -1.0),
         "limit is -1, but it must lie between 0 and 1000000"),
        (lambda one: one.gather(np.zeros(3, np.uint8), None, 1.0),
         "out is None, which only a gather to the first rank has"),
        (lambda one: one.gather(np.zeros(3, np.uint8), np.zeros(5, np.uint8), 1.0),
         "2 ranks with 3 bytes each fill 6, but there are 5"),
        (lambda one: one.gather(np.zeros(3, np.int8), np.zeros(6, np.uint8), 1.0), "own must be an array of uint8"),
        (lambda _: _core.RankMeeting(1), "num_ranks is 1, but it must lie between 2 and 64"),
        (lambda _: _core.RankMeeting(65), "num_ranks is 65, but it must lie between 2 and 64"),
        (lambda _: _core.RankMeeting(2, spin_us=2_000_000), "spin_us is 2000000, but it must be at most 1000000"),
        (lambda one: _core.RankMeeting.join(one.fileno(), 2),
         "the meeting has 2 ranks, so 2 is not one of them: 0 to 1 are"),
        (lambda _: _core.RankMeeting.join(CHANNEL.fileno(), 1), "is not a meeting of ranks of this version"),
        (lambda _: _core.RankMeeting.join(-1, 1), "-1 is not a descriptor"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(act, message):
    with pytest.raises((ValueError, TypeError, OSError)) as raised:
        act(_core.RankMeeting(2))
    assert message in str(raised.value)


def test_own_and_out_may_not_be_the_same_memory():
    memory = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="own and out share memory, but out is written"):
        _core.RankMeeting(2).gather(memory[:4], memory, 1.0)


def test_ranks_look_for_each_other_longer_where_each_has_a_processor(monkeypatch):
    asked = []
    monkeypatch.setattr(_core, "RankMeeting", lambda size, *, spin_us: asked.append((size, spin_us)))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    meetings.make_meeting(2)
    meetings.make_meeting(3)
    meetings.make_meeting(2, 4)  # those of another stage compute, too
    assert asked[0][1] > asked[1][1] == asked[2][1] > 0
