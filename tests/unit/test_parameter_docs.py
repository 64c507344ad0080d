"""``docs/api-parameters.md`` is about the parameters that there are: none is missing, none is made up."""

import re
from pathlib import Path

import pytest

from rustvllm.server.schemas.protocol import ChatCompletionRequest, CompletionRequest
from rustvllm.server.schemas.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS

PAGE = Path(__file__).parents[2] / "docs" / "api-parameters.md"


@pytest.fixture(scope="module")
def sections():
    """By heading, the names in the first column of its tables."""
    found, heading = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| `"):
            found.setdefault(heading, []).extend(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return found


def test_every_parameter_has_its_row_and_every_row_its_parameter(sections):
    taken = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields} - {"suffix"}
    rows = [
        name
        for heading, names in sections.items()
        if heading not in ("Times", "Refused until it is built")
        for name in names
    ]
    assert len(taken) > 40
    assert set(rows) == taken
    assert len(rows) == len(set(rows))


def test_what_is_refused_is_listed_and_nothing_else(sections):
    listed = set(sections["Refused until it is built"])
    refused = {*COMPLETION_REFUSALS, *CHAT_REFUSALS} - {"tool_choice"}
    assert len(refused) > 20
    assert listed == refused
