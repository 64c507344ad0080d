"""What errors show of values that clients sent: the beginning, whatever the value is and however large."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rustvllm.parameter_checks import shown

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text(min_size=70, max_size=100),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_is_shown_is_the_beginning_of_repr(value):
    text = repr(value)
    assert shown(value) == (text if len(text) <= 80 else text[:77] + "...")


@pytest.mark.parametrize(
    "value",
    [
        "a" * (32 << 20),
        ["\0" * (8 << 20)],
        {"a" * (8 << 20): ["\0" * (8 << 20)]},
        list(range(1 << 20)),
        dict.fromkeys(range(1 << 20)),
        {"type": {"type": [["\0" * (8 << 20)]]}},
    ],
    ids=["text", "list", "names", "numbers", "members", "deep"],
)
def test_no_value_is_so_large_that_showing_it_holds_others_up(value):
    seconds = []
    for _ in range(3):
        begin = time.thread_time()
        assert len(shown(value)) == 80
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 0.001


def test_values_without_a_repr():
    assert shown(10**5000) == "a number of 16610 bits"
    assert shown([10**5000]) == "a list"
    deep = value = []
    for _ in range(100_000):
        value.append([])
        value = value[0]
    assert shown(deep) == "[" * 77 + "..."
    while deep:  # a list this deep cannot be freed at once
        deep = deep.pop()
