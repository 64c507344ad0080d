"""Speculative tokens: drafts that run with the next step, some of which are kept."""

import numpy as np
import pytest
from hand_engine import HandEngine, make_scheduler, tokens

from rustvllm import _core
from rustvllm.exceptions import SchedulerStateError

DRAFTS = np.array([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]], np.int32)


@pytest.fixture
def two_rows_with_drafts():
    """A scheduler, and a step of two decodes with five drafts each."""
    scheduler = make_scheduler(num_speculative_tokens=5, block_size=4)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        scheduler.add_request(name, prompt, max_tokens=30)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output), DRAFTS)
    return scheduler, scheduler.schedule()


def test_drafts_run_behind_the_last_token(two_rows_with_drafts):
    scheduler, output = two_rows_with_drafts
    arrays = scheduler.step_buffers[output.buffer_index]
    assert output.total_num_scheduled_tokens == 12
    assert (output.num_sampled, output.num_logits) == (2, 12)
    assert arrays["num_draft_tokens"][:2].tolist() == [5, 5]
    assert arrays["num_scheduled_tokens"][:2].tolist() == [6, 6]
    assert arrays["input_ids"][:12].tolist() == [7, *DRAFTS[0].tolist(), 7, *DRAFTS[1].tolist()]
    assert arrays["positions"][:12].tolist() == [3, 4, 5, 6, 7, 8] * 2
    assert arrays["logits_indices"].shape == (128 * 6,)
    assert arrays["logits_indices"][:12].tolist() == list(range(12))
    assert output.debug_view()["scheduled_spec_decode_tokens"] == {"a": DRAFTS[0].tolist(), "b": DRAFTS[1].tolist()}
    assert scheduler.request_state("a")["num_output_placeholders"] == 6


def test_what_is_accepted_counts_and_what_is_rejected_is_computed_again(two_rows_with_drafts):
    scheduler, output = two_rows_with_drafts
    # "a" keeps two drafts and gets a third token; "b" keeps none.
    sampled = np.array([[11, 12, 40, -1, -1, -1], [41, -1, -1, -1, -1, -1]], np.int32)
    assert scheduler.update_from_output(output, sampled) == 0
    scheduler.check_invariants()
    a, b = scheduler.request_state("a"), scheduler.request_state("b")
    assert (a["token_ids"], a["num_computed_tokens"]) == ([1, 2, 3, 7, 11, 12, 40], 6)
    assert (b["token_ids"], b["num_computed_tokens"]) == ([4, 5, 6, 7, 41], 4)
    assert a["num_output_placeholders"] == b["num_output_placeholders"] == 0
    stats = scheduler.stats()
    assert (stats["num_draft_tokens"], stats["num_accepted_tokens"]) == (10, 2)
    following = scheduler.schedule()
    assert following.total_num_scheduled_tokens == 2, "drafts are for one step"
    assert scheduler.step_buffers[following.buffer_index]["positions"][:2].tolist() == [6, 4]


def test_when_no_draft_was_made_their_entries_are_gone(two_rows_with_drafts):
    scheduler, output = two_rows_with_drafts
    shorter = scheduler.truncate_drafts(output, [0, 0])
    scheduler.check_invariants()
    arrays = scheduler.step_buffers[shorter.buffer_index]
    assert (shorter.step, shorter.total_num_scheduled_tokens, shorter.num_logits) == (output.step, 2, 2)
    assert shorter.debug_view()["scheduled_spec_decode_tokens"] == {}
    assert shorter.debug_view()["num_scheduled_tokens"] == {"a": 1, "b": 1}
    assert arrays["query_start_loc"][:3].tolist() == [0, 1, 2]
    assert arrays["seq_lens"][:2].tolist() == [4, 4]
    assert arrays["input_ids"][:2].tolist() == [7, 7]
    assert (arrays["slot_mapping"][2:] == -1).all(), "padding, also where drafts were"
    assert arrays["num_draft_tokens"][:2].tolist() == [0, 0]
    for name in "ab":
        assert scheduler.request_state(name)["num_computed_tokens"] == 4
    # The first output has been replaced.
    with pytest.raises(SchedulerStateError):
        scheduler.update_from_output(output, tokens(output))
    with pytest.raises(SchedulerStateError):
        output.debug_view()
    assert scheduler.update_from_output(shorter, tokens(shorter)) == 0
    scheduler.check_invariants()
    stats = scheduler.stats()
    assert (stats["num_draft_tokens"], stats["num_accepted_tokens"]) == (0, 0)
    assert stats["num_scheduled_tokens"] == 6 + 2


def test_some_drafts_may_stay(two_rows_with_drafts):
    scheduler, output = two_rows_with_drafts
    shorter = scheduler.truncate_drafts(output, [2, 9])
    assert shorter.total_num_scheduled_tokens == 3 + 6, "who keeps more than there are keeps all"
    assert shorter.debug_view()["scheduled_spec_decode_tokens"] == {"a": [11, 12], "b": DRAFTS[1].tolist()}
    sampled = np.array([[11, 12, 13, -1], [21, 22, 23, 24]], np.int32)
    scheduler.update_from_output(shorter, sampled)
    scheduler.check_invariants()
    assert scheduler.request_state("a")["num_tokens"] == 7
    assert scheduler.request_state("b")["num_tokens"] == 8


def test_a_stop_among_the_drafts_drops_what_follows_it():
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add_request("a", [1, 2, 3], max_tokens=30, eos_token_id=50)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output), np.array([[10, 50, 11]], np.int32))
    output = scheduler.schedule()
    assert scheduler.update_from_output(output, np.array([[10, 50, 11, 12]], np.int32)) == 1
    records = scheduler.take_outputs()
    assert [record["new_token_id"] for record in records] == [7, 10, 50]
    assert records[-1]["finish_reason"] == "stop"
    scheduler.check_invariants()


def test_drafts_never_run_past_the_end():
    scheduler = make_scheduler(num_speculative_tokens=5)
    scheduler.add_request("a", [1, 2, 3], max_tokens=3)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output), DRAFTS[:1])
    output = scheduler.schedule()
    assert output.debug_view()["scheduled_spec_decode_tokens"] == {"a": [11]}, "two tokens are left to give"
    assert scheduler.update_from_output(output, np.array([[11, 30]], np.int32)) == 1


def test_a_row_of_minus_one_is_no_draft():
    scheduler = make_scheduler(num_speculative_tokens=3)
    for name in "ab":
        scheduler.add_request(name, [1, 2, 3], max_tokens=9)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output), np.array([[-1, -1], [5, -1]], np.int32))
    output = scheduler.schedule()
    assert output.debug_view()["scheduled_spec_decode_tokens"] == {"b": [5]}
    assert (output.total_num_scheduled_tokens, output.num_logits) == (3, 3)


def test_overlapping_steps_have_drafts_that_only_the_worker_knows():
    engine = HandEngine(num_speculative_tokens=2, max_steps_in_flight=2)
    scheduler = engine.scheduler
    scheduler.add_request("a", [1, 2, 3], max_tokens=20)
    first, second = scheduler.schedule(), scheduler.schedule()
    arrays = scheduler.step_buffers[second.buffer_index]
    assert (first.total_num_scheduled_tokens, second.total_num_scheduled_tokens) == (3, 3)
    assert arrays["input_ids"][:3].tolist() == [-1, -1, -1], "the last sampled token, then its drafts"
    assert second.debug_view()["scheduled_spec_decode_tokens"] == {"a": [-1, -1]}
    with pytest.raises(SchedulerStateError, match="drafts have 1 columns; the limit is 0"):
        scheduler.update_from_output(first, tokens(first), np.zeros((1, 1), np.int32))
    scheduler.update_from_output(first, tokens(first, 30))
    scheduler.check_invariants()
    third = scheduler.schedule()
    assert scheduler.request_state("a")["num_output_placeholders"] == 6
    # One draft of the second step is accepted, none of the third.
    scheduler.update_from_output(second, np.array([[31, 32, -1]], np.int32))
    scheduler.check_invariants()
    state = scheduler.request_state("a")
    assert (state["token_ids"][3:], state["num_output_placeholders"]) == ([30, 31, 32], 3)
    scheduler.update_from_output(third, np.array([[33, -1, -1]], np.int32))
    scheduler.check_invariants()
    state = scheduler.request_state("a")
    assert (state["token_ids"][3:], state["num_output_placeholders"]) == ([30, 31, 32, 33], 0)
    assert state["num_computed_tokens"] == 6


def test_drafts_take_what_prompts_leave_of_the_budget():
    scheduler = make_scheduler(num_speculative_tokens=5, block_size=4, max_num_batched_tokens=8)
    scheduler.add_request("a", [1, 2, 3], max_tokens=30)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output), DRAFTS[:1])
    scheduler.add_request("b", [4, 5, 6, 7, 8], max_tokens=30)
    output = scheduler.schedule()
    assert output.debug_view()["num_scheduled_tokens"] == {"a": 3, "b": 5}
    assert output.debug_view()["scheduled_spec_decode_tokens"] == {"a": [11, 12]}
    scheduler.check_invariants()


def test_drafts_leave_a_block_for_each_running_request():
    scheduler = make_scheduler(num_speculative_tokens=5, block_size=2, num_blocks=6, enable_prefix_caching=False)
    for name in "ab":
        scheduler.add_request(name, [1, 2, 3], max_tokens=4)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output), DRAFTS)
    output = scheduler.schedule()
    # One of five usable blocks is free, two requests run: no draft gets it.
    assert output.debug_view()["num_scheduled_tokens"] == {"a": 1, "b": 1}
    assert scheduler.stats()["num_preemptions"] == 0


def test_the_scheduler_finds_drafts_in_the_requests_own_tokens():
    drafter = _core.DrafterConfig(method="ngram", prompt_lookup_min=2, prompt_lookup_max=3, adaptive=False)
    scheduler = make_scheduler(num_speculative_tokens=3, drafter=drafter)
    scheduler.add_request("a", [1, 2, 3, 4, 5, 6], max_tokens=30)
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens(output, 2))
    output = scheduler.schedule()
    assert output.debug_view()["scheduled_spec_decode_tokens"] == {}, "6, 2 did not occur before"
    scheduler.update_from_output(output, tokens(output, 3))
    output = scheduler.schedule()
    assert output.debug_view()["scheduled_spec_decode_tokens"] == {"a": [4, 5, 6]}, "2, 3 did"
    assert scheduler.step_buffers[output.buffer_index]["input_ids"][:4].tolist() == [3, 4, 5, 6]
    scheduler.update_from_output(output, np.array([[4, 5, 9, -1]], np.int32))
    scheduler.check_invariants()
    assert scheduler.request_state("a")["token_ids"][6:] == [2, 3, 4, 5, 9]
    stats = scheduler.stats()
    assert (stats["num_drafts"], stats["num_draft_tokens"], stats["num_accepted_tokens"]) == (1, 3, 2)


def test_with_drafts_of_its_own_a_step_waits_for_the_one_before():
    drafter = _core.DrafterConfig(method="ngram", prompt_lookup_min=1, prompt_lookup_max=1, adaptive=False)
    scheduler = make_scheduler(num_speculative_tokens=2, max_steps_in_flight=2, drafter=drafter)
    scheduler.add_request("a", [1, 2, 1, 3], max_tokens=30)
    first = scheduler.schedule()
    assert scheduler.schedule() is None, "its token is not known yet"
    scheduler.update_from_output(first, tokens(first, 1))
    second = scheduler.schedule()
    assert second.debug_view()["scheduled_spec_decode_tokens"] == {"a": [2, 1]}
    assert scheduler.schedule() is None
    scheduler.update_from_output(second, np.array([[40, -1, -1]], np.int32))
    token_id = 41
    for _ in range(8):  # tokens that never occurred
        output = scheduler.schedule()
        scheduler.update_from_output(output, tokens(output, token_id))
        token_id += 1
    one, other = scheduler.schedule(), scheduler.schedule()
    assert other is not None, "nothing was found for a while: steps overlap"
    for output in (one, other):
        scheduler.update_from_output(output, tokens(output, token_id))
        token_id += 1
    scheduler.check_invariants()


def test_a_drafter_needs_room_for_its_drafts():
    with pytest.raises(ValueError, match="num_speculative_tokens must be between 1 and 64, got 0"):
        make_scheduler(drafter=_core.DrafterConfig(method="suffix"))
    with pytest.raises(ValueError, match="prompt_lookup_min must be between 1 and 3, got 4"):
        _core.DrafterConfig(method="ngram", prompt_lookup_min=4, prompt_lookup_max=3)
