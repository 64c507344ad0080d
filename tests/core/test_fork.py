"""Forks: one prompt, several continuations that share its blocks."""

import pytest
from hand_engine import HandEngine, make_scheduler, tokens

from rustvllm.exceptions import QueueFullError

PROMPT = range(1, 11)  # two full blocks of four, and two tokens


def fork(engine, prompt=PROMPT, count=2, **params):
    handle = engine.scheduler.handle
    samples = [(handle.new_key(), f"c{i}", 100 + i) for i in range(count)]
    return engine.add("p", prompt, samples=samples, **params), samples


def ref_counts(engine, blocks):
    states = engine.scheduler.block_states()
    return [states[block]["ref_count"] for block in blocks]


def test_samples_share_full_blocks_and_copy_the_partial_one():
    engine = HandEngine(block_size=4)
    fork(engine, max_tokens=6, seed=99)
    first = engine.step()
    assert first.total_num_scheduled_tokens == 9, "the last token of the prompt is for each to compute"
    assert first.num_sampled == 0
    assert engine.scheduler.queues()["waiting"] == ["c0", "c1"]
    second = engine.schedule()
    view, arrays = second.debug_view(), engine.arrays(second)
    assert view["num_scheduled_tokens"] == {"p": 1, "c0": 1, "c1": 1}
    tables = [engine.state(name)["block_table"] for name in ("p", "c0", "c1")]
    shared, partial = tables[0][:2], [table[2] for table in tables]
    assert [table[:2] for table in tables] == [shared] * 3
    assert len(set(partial)) == 3
    assert ref_counts(engine, shared) == [3, 3]
    assert ref_counts(engine, partial) == [1, 1, 1]
    pairs = arrays["blocks_to_copy"][: second.num_copies].tolist()
    assert pairs == [[partial[0], partial[1]], [partial[0], partial[2]]]
    assert view["blocks_to_copy"] == [tuple(pair) for pair in pairs]
    seed = arrays["sampling_int"][:2, 1]  # column "seed"
    assert seed.tolist() == [100, 101]
    assert [request["num_computed_tokens"] for request in view["scheduled_new_reqs"]] == [9, 9]
    engine.update()
    engine.finish()
    stats = engine.scheduler.stats()
    assert (stats["num_forks"], stats["num_preemptions"]) == (2, 0)
    assert stats["num_scheduled_tokens"] == 9 + 3 * 6


def test_a_prompt_that_ends_a_block_needs_no_copy():
    engine = HandEngine(block_size=4)
    fork(engine, range(1, 10))  # 8 tokens are shared
    engine.step()
    output = engine.schedule()
    assert output.num_copies == 0
    tables = [engine.state(name)["block_table"] for name in ("p", "c0", "c1")]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    engine.update()
    engine.finish()


def test_a_live_request_is_forked_where_its_tokens_and_the_prompt_part():
    engine = HandEngine(block_size=4)
    parent = engine.add("p", PROMPT, max_tokens=9)
    for _ in range(4):
        engine.step()
    so_far = engine.state("p")["token_ids"]
    assert len(so_far) == 14
    # The same tokens up to the last, and then another one.
    engine.add("c", [*so_far[:12], 3], max_tokens=5, fork_from=parent)
    output = engine.schedule()
    child, table = engine.state("c"), engine.state("p")["block_table"]
    assert child["block_table"][:3] == table[:3]
    assert ref_counts(engine, table[:3]) == [2, 2, 2]
    assert output.num_copies == 0
    assert output.debug_view()["num_scheduled_tokens"] == {"p": 1, "c": 1}
    engine.update()
    engine.finish()
    assert engine.scheduler.stats()["num_forks"] == 1


@pytest.mark.parametrize("reason", ["unknown parent", "other tokens", "other salt", "finished parent"])
def test_without_a_parent_that_fits_a_child_is_an_ordinary_request(reason):
    engine = HandEngine(block_size=4)
    parent = engine.add("p", PROMPT, max_tokens=1 if reason == "finished parent" else 9)
    engine.step()
    params = {"fork_from": 10**9 if reason == "unknown parent" else parent}
    if reason == "other salt":
        params["cache_salt"] = "x"
    prompt = [9, 9, *range(3, 11)] if reason == "other tokens" else PROMPT
    engine.add("c", prompt, **params)
    output = engine.schedule()
    assert output.num_copies == 0
    assert engine.state("c")["status"] == "RUNNING"
    engine.update()
    engine.finish()
    assert engine.scheduler.stats()["num_forks"] == 0


def test_when_the_parent_is_aborted_a_child_takes_its_place():
    engine = HandEngine(block_size=4, max_num_batched_tokens=4, max_num_seqs=4)
    parent, _ = fork(engine)
    engine.step()
    engine.scheduler.abort_requests(["p"])
    engine.step()
    assert engine.scheduler.queues()["running"] == ["c0"]
    assert engine.scheduler.queues()["waiting"] == ["c1"]
    engine.finish(aborted=[parent])
    assert engine.scheduler.stats()["num_forks"] == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("swap", [False, True])
def test_forks_in_a_small_pool_get_their_tokens(depth, swap):
    numbers = {"preemption_mode": "swap", "num_cpu_blocks": 20} if swap else {}
    engine = HandEngine(block_size=4, num_blocks=16, max_model_len=48, max_steps_in_flight=depth, **numbers)
    for i in range(3):
        handle = engine.scheduler.handle
        samples = [(handle.new_key(), f"{i}-{j}", j) for j in range(3)]
        engine.add(f"{i}", range(i + 1, i + 12), max_tokens=20, samples=samples)
    engine.finish()
    stats = engine.scheduler.stats()
    assert stats["num_forks"] > 0
    assert stats["num_preemptions"] > 0


def test_all_samples_are_taken_in_or_none():
    scheduler = make_scheduler(max_num_queued_reqs=2)
    samples = [(scheduler.handle.new_key(), f"c{i}", i) for i in range(2)]
    with pytest.raises(QueueFullError, match="3 more would exceed max_num_queued_reqs = 2; send fewer at a time"):
        scheduler.add_request("p", [1, 2, 3], max_tokens=2, samples=samples)
    assert not scheduler.has_unfinished_requests()
    scheduler.add_request("p", [1, 2, 3], max_tokens=1, samples=samples[:1])
    while (output := scheduler.schedule()) is not None:
        scheduler.update_from_output(output, tokens(output))
    assert len(scheduler.take_outputs()) == 2
