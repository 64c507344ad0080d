"""The suite is whole: every row of the table of parameters has a valid, an edge and an invalid case, or a reason."""

import importlib.util
from pathlib import Path

import pytest
from conformance_case import OURS, PARAMETERS, WIRE, Case

FILES = (
    "test_sampling",
    "test_length_and_stop",
    "test_token_rules",
    "test_prompts",
    "test_requests",
    "test_streams",
    "test_wire",
)
WITHOUT = {
    ("prompt_embeds", "valid"): "not built",
    ("suffix", "valid"): "no model here is trained to fill in the middle",
    ("user, metadata, store, service_tier, unknown fields", "invalid"): "they are not looked at",
    ("return_progress", "valid"): "only in a stream: test_progress_ends_with_the_whole_prompt_and_changes_nothing_else",
}
"""Row and kind that has no case, and why."""
ELSEWHERE = {
    "model": ("test_wire", "test_every_name_is_served_and_echoed_as_typed", "test_another_name_is_a_404"),
    "error body": ("test_wire", "test_a_wrong_field_is_a_400_of_the_same_shape_and_never_a_422"),
    "completions stream": (
        "test_streams",
        "test_each_event_of_a_completion_has_one_choice_and_the_last_its_reason_and_text",
    ),
    "chat stream": ("test_streams", "test_a_chat_begins_with_the_role_and_ends_with_the_reason"),
    "usage in streams": ("test_streams", "test_usage_comes_once_at_the_end_or_with_every_event"),
    "interleaved choices": ("test_streams", "test_choices_interleave_and_each_ends_once"),
    "models": ("test_wire", "test_the_list_of_models_has_a_card_for_each_name"),
    "served-model-name": ("test_wire", "test_every_name_is_served_and_echoed_as_typed"),
    "endpoints that are not there": ("test_wire", "test_endpoints_that_are_not_there"),
    "body": ("test_wire", "test_a_body_that_cannot_be_read_is_a_400"),
    "tokenize / detokenize": ("test_wire", "test_tokens_and_back"),
    "probes": ("test_wire", "test_probes"),
}
"""Rows that are not a single request: their tests."""


def load(name):
    spec = importlib.util.spec_from_file_location(f"conformance_{name}", Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules():
    return {name: load(name) for name in FILES}


def test_every_file_with_cases_is_looked_at():
    here = {path.stem for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).stem}
    assert here == set(FILES)


def test_every_row_has_its_cases(modules):
    cases = [case for module in modules.values() for case in module.CASES]
    assert len(cases) > 250
    assert all(isinstance(case, Case) for case in cases)
    rows = {*PARAMETERS, *OURS, *WIRE}
    assert {case.row for case in cases} <= rows
    have = {(case.row, case.kind) for case in cases}
    wanted = {
        (row, kind) for row in (*PARAMETERS, *OURS) if row not in ELSEWHERE for kind in ("valid", "edge", "invalid")
    }
    assert wanted - have == set(WITHOUT)


def test_every_other_row_has_its_tests(modules):
    covered = {case.row for module in modules.values() for case in module.CASES}
    assert set(WIRE) - covered <= set(ELSEWHERE)
    for module, *names in ELSEWHERE.values():
        for name in names:
            assert callable(getattr(modules[module], name))


def test_an_invalid_case_blames_a_field_and_quotes_something(modules):
    invalid = [case for module in modules.values() for case in module.CASES if case.kind == "invalid"]
    assert len(invalid) > 120
    for case in invalid:
        assert case.param, case
        assert case.says, case
