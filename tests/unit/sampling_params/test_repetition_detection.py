"""``RepetitionDetectionParams``: which numbers are taken, what they come to, and what refuses the others."""

import pytest

import rustvllm
from rustvllm import SamplingParams
from rustvllm.engine.request.core_request import engine_params
from rustvllm.exceptions import InvalidRequestError
from rustvllm.sampling_params import RepetitionDetectionParams

LARGEST = 2**31 - 1


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ((), None),
        ((0, 0, 1), None),
        ((0, 0, LARGEST), None),
        ((1, 0, 2), (1, 1, 2)),
        ((20, 3, 4), (3, 20, 4)),
        ((1024, 1024, LARGEST), (1024, 1024, LARGEST)),
    ],
)
def test_what_is_looked_for(given, numbers):
    params = RepetitionDetectionParams(*given)
    assert params.numbers == numbers
    made = engine_params(SamplingParams(repetition_detection=params))
    assert made.repetition_detection == (None if numbers is None else params)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size of repetition_detection must be at least 0, got -1"),
        ({"max_pattern_size": 1025, "min_count": 2}, "max_pattern_size .* must be at most 1024, got 1025"),
        ({"max_pattern_size": 10**400}, "max_pattern_size .* at most 1024"),
        ({"max_pattern_size": True, "min_count": 2}, "max_pattern_size .* must be an integer, got True"),
        ({"max_pattern_size": 2.0, "min_count": 2}, "max_pattern_size .* must be an integer, got 2.0"),
        ({"max_pattern_size": None}, "max_pattern_size .* must be an integer, got None"),
        ({"max_pattern_size": "4", "min_count": 2}, "max_pattern_size .* must be an integer, got '4'"),
        ({"max_pattern_size": 4, "min_pattern_size": -1, "min_count": 2}, "min_pattern_size .* at least 0, got -1"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, r"at most max_pattern_size \(4\), got 5"),
        ({"min_pattern_size": 1}, r"min_pattern_size .* at most max_pattern_size \(0\), got 1"),
        ({"max_pattern_size": 4}, "min_count .* must be at least 2, got 0; to look for no repetition, set"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count .* must be at least 2, got 1"),
        ({"max_pattern_size": 4, "min_count": -2}, "min_count .* must be at least 0, got -2"),
        ({"max_pattern_size": 4, "min_count": LARGEST + 1}, f"min_count .* at most {LARGEST}"),
        ({"max_pattern_size": 4, "min_count": float("nan")}, "min_count .* must be an integer, got nan"),
    ],
)
def test_other_numbers_are_refused(given, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        RepetitionDetectionParams(**given)
    assert caught.value.param == "repetition_detection"
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 200


def test_it_cannot_be_changed_and_is_found_where_vllm_has_it():
    params = RepetitionDetectionParams(max_pattern_size=20, min_pattern_size=3, min_count=4)
    with pytest.raises(AttributeError):
        params.min_count = 5
    assert params == RepetitionDetectionParams(20, 3, 4)
    assert rustvllm.RepetitionDetectionParams is RepetitionDetectionParams
    assert SamplingParams(repetition_detection=params).clone(n=2, temperature=1).repetition_detection is params
