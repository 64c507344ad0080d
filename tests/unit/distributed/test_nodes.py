"""Which ranks and stages a node has, which facts nodes must share, and how a rank reports what it waits in."""

from typing import Any

import pytest

from rustvllm.distributed.commands import ReportedTime, wait_of
from rustvllm.distributed.facts import node_difference
from rustvllm.distributed.nodes import NodeShare
from rustvllm.distributed.rank_group import timed


@pytest.mark.parametrize(
    ("nnodes", "tensor_size", "num_stages", "ranks", "stages"),
    [
        (2, 2, 1, [[0], [1]], [[], []]),
        (2, 2, 2, [[0, 1], [2, 3]], [[1], [0]]),
        (2, 2, 3, [[0, 1, 2], [3, 4, 5]], [[2], [0]]),  # the stage between them adds over the network
        (2, 1, 4, [[0, 1], [2, 3]], [[2, 3], [0, 1]]),
        (1, 4, 2, [[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1]]),
        (4, 4, 1, [[0], [1], [2], [3]], [[], [], [], []]),
    ],
)
def test_ranks_lie_in_a_row_and_a_stage_is_a_nodes_own_when_all_its_ranks_are(
    nnodes: int, tensor_size: int, num_stages: int, ranks: list[list[int]], stages: list[list[int]]
) -> None:
    shares = [NodeShare(node, nnodes, tensor_size, num_stages) for node in range(nnodes)]
    assert [list(share.ranks) for share in shares] == ranks
    assert [share.own_stages for share in shares] == stages


def test_the_first_fact_that_differs_is_named_with_both_sides() -> None:
    head = {"rustvllm": "1", "torch": "2.15", "model": "aa", "dtype": "float32"}
    assert node_difference(dict(head), "node 1", head, "node 0") is None
    assert "node 1 has torch 2.14, node 0 has 2.15" in (
        node_difference({**head, "torch": "2.14", "dtype": "x"}, "node 1", head, "node 0") or ""
    )
    assert "node 1 has model (a fingerprint of its files) bb, node 0 has aa" in (
        node_difference({**head, "model": "bb"}, "node 1", head, "node 0") or ""
    )
    older = {name: value for name, value in head.items() if name != "dtype"}
    assert "node 1 has dtype None, node 0 has float32" in (node_difference(older, "node 1", head, "node 0") or "")


def test_a_rank_says_in_which_collective_of_which_layer_it_waits() -> None:
    said: list[int] = []

    class Reader:
        def note_activity(self, activity: int) -> None:
            said.append(activity)

    reader: Any = Reader()
    spent = ReportedTime(reader)
    for name, layer in (("all_reduce", 0), ("all_reduce", 79), ("all_reduce", -1), ("gather", 3), ("receive", -1)):
        spent.layer = layer
        with timed(spent, name):
            assert spent.current == name
    waits = [wait_of(activity) for activity in said[1:]]
    assert waits[::2] == [
        ("all_reduce", 0), ("all_reduce", 79), ("all_reduce", -1), ("a collective", -1), ("receive", -1)
    ]  # fmt: skip
    assert waits[1::2] == [("", -1)] * 5, "nothing is waited for in between"
    assert spent.calls == 5
