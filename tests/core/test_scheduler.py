"""``_core.Scheduler`` from Python: the arrays, the debug face, and misuse that raises and harms nothing."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rustvllm import _core
from rustvllm.exceptions import InvalidRequestError, QueueFullError, SchedulerStateError, WrongThreadError

DOC = Path(__file__).parents[2] / "docs" / "scheduler.md"
Buffers = list[dict[str, np.ndarray]]


def make_config(**overrides: object) -> _core.SchedulerConfig:
    numbers: dict[str, object] = {"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 8} | overrides
    return _core.SchedulerConfig(**numbers)  # type: ignore[arg-type]


def make_buffers(config: _core.SchedulerConfig, count: int = 2) -> Buffers:
    return [
        {name: np.zeros(shape, dtype) for name, dtype, shape in _core.step_buffer_spec(config)} for _ in range(count)
    ]


def make_scheduler(**overrides: object) -> tuple[_core.Scheduler, Buffers]:
    config = make_config(**overrides)
    buffers = make_buffers(config)
    return _core.Scheduler(config, buffers), buffers


def add(scheduler: _core.Scheduler, request_id: str, prompt: list[int], max_tokens: int = 4, **params: object) -> int:
    key = scheduler.handle.new_key()
    scheduler.handle.add_request(key, request_id, prompt, max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return key


def tokens(output: _core.SchedulerOutput, token_id: int = 7) -> np.ndarray:
    return np.full((output.num_sampled, 1), token_id, np.int32)


def test_the_example_of_the_documentation_prints_what_it_says() -> None:
    text = DOC.read_text()
    example = re.search(r"```python\n(.*?)```\s+```text\n(.*?)```", text, re.DOTALL)
    assert example
    code, printed = example.groups()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == printed


def test_the_worked_trace_of_the_documentation_is_what_happens() -> None:
    rows = [line.split("|")[1:-1] for line in DOC.read_text().splitlines() if re.match(r"\| (\d|–) \| [A-Z]", line)]
    documented = [[cell.strip() for cell in row] for row in rows]
    scheduler = _core.Scheduler(make_config(max_num_batched_tokens=32))
    scheduler.set_trace(True)
    scheduler.add_request("a", list(range(40)), max_tokens=3)
    tables = {}
    while (output := scheduler.schedule()) is not None:
        state = scheduler.request_state("a")
        assert state
        tables[output.step] = " ".join(map(str, state["block_table"]))
        scheduler.update_from_output(output, tokens(output))
    events, num_dropped = scheduler.take_events()
    assert num_dropped == 0
    happened = []
    for event in events:
        scheduled = event["num_scheduled_tokens"]
        happened.append(
            [
                str(event["step"]) if scheduled else "–",
                event["status"],
                str(scheduled) if scheduled else "",
                str(event["num_computed_tokens"]),
                str(event["num_tokens"]),
                tables[event["step"]] if scheduled else "",
            ]
        )
    assert [row[:6] for row in documented] == happened


def test_arrays_of_a_mixed_step() -> None:
    scheduler, buffers = make_scheduler()
    add(
        scheduler,
        "a",
        list(range(100, 120)),
        temperature=0.5,
        top_k=3,
        seed=11,
        min_tokens=2,
        eos_token_id=9,
        stop_token_ids=[4, 5],
    )
    output = scheduler.schedule()
    assert output is not None
    scheduler.update_from_output(output, tokens(output, 42))
    add(scheduler, "b", [1, 2, 3])
    output = scheduler.schedule()
    assert output is not None
    arrays = buffers[output.buffer_index]
    n, total = output.num_reqs, output.total_num_scheduled_tokens
    assert (n, total, output.num_sampled, output.num_new_reqs) == (2, 4, 2, 1)
    assert arrays["num_scheduled_tokens"][:n].tolist() == [1, 3]
    assert arrays["query_start_loc"].tolist() == [0, 1] + [4] * 7
    assert arrays["input_ids"][:total].tolist() == [42, 1, 2, 3]
    assert arrays["positions"][:total].tolist() == [20, 0, 1, 2]
    assert arrays["seq_lens"][:n].tolist() == [21, 3]
    assert arrays["logits_indices"][:2].tolist() == [0, 3]
    state_a, state_b = scheduler.request_state("a"), scheduler.request_state("b")
    assert state_a
    assert state_b
    assert arrays["idx_mapping"][:n].tolist() == [state_a["row"], state_b["row"]]
    assert arrays["slot_mapping"][:total].tolist() == [
        state_a["block_table"][1] * 16 + 4,
        *(state_b["block_table"][0] * 16 + i for i in range(3)),
    ]


def test_parameters_travel_once_with_a_new_row() -> None:
    scheduler, buffers = make_scheduler()
    add(
        scheduler,
        "a",
        [1, 2],
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        top_k=3,
        seed=2**62,
        min_tokens=2,
        eos_token_id=9,
        stop_token_ids=[4, 5],
        num_logprobs=2,
    )
    output = scheduler.schedule()
    assert output is not None
    arrays = buffers[output.buffer_index]
    floats = dict(zip(_core.SAMPLING_FLOAT_COLUMNS, arrays["sampling_float"][0].tolist(), strict=True))
    assert floats == pytest.approx(
        {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_n_sigma": 0.0,
            "length_penalty": 1.0,
            "min_p": 0.1,
            "presence_penalty": 0.25,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
        }
    )
    ints = dict(zip(_core.SAMPLING_INT_COLUMNS, arrays["sampling_int"][0].tolist(), strict=True))
    assert ints == {
        "beam_width": 0,
        "pooling": 0,
        "top_k": 3,
        "seed": 2**62,
        "min_tokens": 2,
        "num_prompt_tokens": 2,
        "num_logprobs": 2,
        "num_prompt_logprobs": -1,
        "adapter": 0,
        "has_extras": 0,
        "num_multimodal": 0,
    }
    assert arrays["stop_token_ids"][: arrays["stop_indptr"][1]].tolist() == [9, 4, 5]
    scheduler.update_from_output(output, tokens(output))
    following = scheduler.schedule()
    assert following is not None
    assert following.num_new_reqs == 0


def test_the_debug_view_names_the_step() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", list(range(20)), max_tokens=1)
    add(scheduler, "b", [1, 2, 3])
    output = scheduler.schedule()
    assert output is not None
    view = output.debug_view()
    assert view["num_scheduled_tokens"] == {"a": 20, "b": 3}
    assert [request["req_id"] for request in view["scheduled_new_reqs"]] == ["a", "b"]
    assert view["scheduled_new_reqs"][0]["new_block_ids"] == [1, 2]
    scheduler.update_from_output(output, tokens(output))
    with pytest.raises(SchedulerStateError, match="has been updated"):
        output.debug_view()
    output = scheduler.schedule()
    assert output is not None
    assert output.debug_view()["finished_req_ids"] == ["a"]
    assert scheduler.queues() == {"waiting": [], "running": ["b"], "leaving": []}


def test_block_states_show_who_holds_and_what_is_cached() -> None:
    scheduler, _ = make_scheduler(num_blocks=20)
    add(scheduler, "a", list(range(40)), max_tokens=1)
    output = scheduler.schedule()
    assert output is not None
    scheduler.update_from_output(output, tokens(output))
    states = scheduler.block_states()
    assert states[0]["is_null"]
    assert [state["is_cached"] for state in states[1:4]] == [True, True, False]
    order = sorted((s["free_position"], s["block_id"]) for s in states if s["free_position"] is not None)
    assert order[0][1] == 3, "the uncached block goes first"
    assert [block for _, block in order][-2:] == [2, 1], "the tail of the chain goes before its head"
    assert scheduler.prefix_hit_length(list(range(40))) == 32
    assert scheduler.prefix_hit_length(list(range(40)), cache_salt="other") == 0
    assert scheduler.reset_prefix_cache()
    assert scheduler.prefix_hit_length(list(range(40))) == 0


def test_either_hash_finds_what_is_cached() -> None:
    for name in ("siphash13", "sha256"):
        scheduler, _ = make_scheduler(hash_algorithm=name)
        assert scheduler.config.hash_algorithm == name
        add(scheduler, "a", list(range(40)), max_tokens=1)
        output = scheduler.schedule()
        assert output is not None
        scheduler.update_from_output(output, tokens(output))
        assert scheduler.prefix_hit_length(list(range(40))) == 32
        assert scheduler.prefix_hit_length([9, *range(1, 40)]) == 0


Misuse = Callable[[_core.Scheduler, _core.SchedulerOutput], object]


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (
            lambda s, o: s.update_from_output(o, np.zeros((5, 1), np.int32)),
            SchedulerStateError,
            "must have 1 rows.*got 5",
        ),
        (lambda s, o: s.update_from_output(o, np.zeros((1, 1), np.int64)), TypeError, "int32"),
        (lambda s, o: s.update_from_output(o, np.zeros((1, 1), np.float32)), TypeError, "int32"),
        (lambda s, o: s.update_from_output(o, np.zeros((1, 1, 1), np.int32)), ValueError, "dimensions"),
        (lambda s, o: s.update_from_output(o, [7]), TypeError, "int32"),
        (lambda s, o: s.update_from_output(None, np.zeros((1, 1), np.int32)), TypeError, "SchedulerOutput"),
        (lambda s, o: s.token_ids(6), ValueError, "row 6"),
    ],
)
def test_misuse_raises_and_leaves_the_step_in_flight(misuse: Misuse, error: type[Exception], message: str) -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", [1, 2, 3], max_tokens=2)
    output = scheduler.schedule()
    assert output is not None
    with pytest.raises(error, match=message):
        misuse(scheduler, output)
    scheduler.check_invariants()
    assert scheduler.update_from_output(output, tokens(output)) == 0
    with pytest.raises(SchedulerStateError, match="no step is in flight"):
        scheduler.update_from_output(output, tokens(output))
    output = scheduler.schedule()
    assert output is not None
    assert scheduler.update_from_output(output, tokens(output)) == 1


def test_a_step_in_flight_is_an_error_that_says_what_to_do() -> None:
    scheduler, _ = make_scheduler()
    add(scheduler, "a", [1, 2, 3], max_tokens=2)
    output = scheduler.schedule()
    assert output is not None
    with pytest.raises(SchedulerStateError, match="step 1 is in flight, and max_steps_in_flight is 1; call update"):
        scheduler.schedule()
    other, _ = make_scheduler()
    with pytest.raises(SchedulerStateError, match="another Scheduler"):
        other.update_from_output(output, tokens(output))
    scheduler.check_invariants()
    assert scheduler.update_from_output(output, tokens(output)) == 0


def test_another_thread_is_refused() -> None:
    scheduler, _ = make_scheduler()
    scheduler.schedule()
    caught: list[BaseException] = []

    def intrude() -> None:
        try:
            scheduler.schedule()
        except WrongThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join(timeout=10)
    assert len(caught) == 1
    scheduler.check_invariants()


def test_buffers_are_checked_when_they_are_registered() -> None:
    config = make_config()
    good = make_buffers(config)[0]
    for name, array, error in [
        ("input_ids", None, KeyError),
        ("input_ids", good["input_ids"].astype(np.int64), TypeError),
        ("input_ids", good["input_ids"].astype(">i4"), TypeError),
        ("input_ids", good["input_ids"][:-1].copy(), ValueError),
        ("input_ids", np.zeros(2 * good["input_ids"].size, np.int32)[::2], ValueError),
        ("sampling_float", bytes(8), TypeError),
    ]:
        bad = {key: value for key, value in good.items() if key != name} | ({} if array is None else {name: array})
        with pytest.raises(error, match=name):
            _core.Scheduler(config, [bad])
    readonly = dict(good)
    readonly["input_ids"] = good["input_ids"].copy()
    readonly["input_ids"].flags.writeable = False
    with pytest.raises((TypeError, ValueError), match="input_ids"):
        _core.Scheduler(config, [readonly])
    with pytest.raises(ValueError, match="share memory"):
        _core.Scheduler(config, [good, good])
    with pytest.raises(ValueError, match="share memory"):
        _core.Scheduler(config, [good | {"positions": good["slot_mapping"]}])
    with pytest.raises(ValueError, match="at least 2 step buffer sets"):
        _core.Scheduler(config, [])


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "no tokens"),
        (list(range(256)), {}, "maximum context length is 256 tokens.*contains 256 input tokens"),
        ([1, -2], {}, "token id -2 at position 1"),
        ([1], {"stop_token_ids": list(range(2000))}, "2000 entries"),
    ],
)
def test_requests_that_can_never_run_are_refused(prompt: list[int], params: dict[str, object], message: str) -> None:
    scheduler, _ = make_scheduler()
    with pytest.raises(InvalidRequestError, match=message):
        add(scheduler, "a", prompt, **params)
    assert not scheduler.has_unfinished_requests()


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    scheduler, _ = make_scheduler(num_blocks=4)
    with pytest.raises(InvalidRequestError, match="up to 7 KV blocks of 16 tokens, but there are only 3"):
        add(scheduler, "a", list(range(10)), max_tokens=100)
    with pytest.raises(InvalidRequestError, match="without chunked prefill"):
        add(make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=8)[0], "a", list(range(10)))


def test_a_full_queue_is_an_answer_and_not_a_loss() -> None:
    scheduler, _ = make_scheduler(max_num_queued_reqs=2)
    add(scheduler, "a", [1], max_tokens=1)
    add(scheduler, "b", [1], max_tokens=1)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        add(scheduler, "c", [1])
    output = scheduler.schedule()
    assert output is not None
    assert output.num_reqs == 2
    add(scheduler, "c", [1])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_blocks": 1}, "num_blocks must be between 2 and"),
        ({"block_size": 0}, "block_size must be between 1 and 1024, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"watermark": 1.0}, "watermark"),
        ({"watermark": float("nan")}, "watermark"),
        ({"num_blocks": 2**27, "block_size": 1024}, "num_blocks must be at most 2097151"),
        ({"scheduling_policy": "lifo"}, "'fcfs', 'priority' or 'fair'"),
        ({"hash_algorithm": "md5"}, "'siphash13' or 'sha256', got \"md5\""),
    ],
)
def test_numbers_outside_their_limits(numbers: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**numbers)


def test_wait_for_work_wakes_and_times_out() -> None:
    scheduler, _ = make_scheduler()
    handle = scheduler.handle
    assert not handle.wait_for_work(0.01)
    handle.wake()
    assert handle.wait_for_work(10.0)
    timer = threading.Timer(0.05, lambda: add(scheduler, "a", [1]))
    timer.start()
    assert handle.wait_for_work(30.0)
    timer.join()
    assert scheduler.has_unfinished_requests()
    for timeout in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            handle.wait_for_work(timeout)
