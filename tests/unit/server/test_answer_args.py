"""The flags about answers are the same with a server and without one."""

import pytest

from rustvllm.cli import run_batch, serve

ANSWERS = ["--default-chat-template-kwargs", '{"a": 1}', "--response-role", "narrator", "--return-tokens-as-token-ids"]
ANSWERS += ["--tool-call-parser", "hermes", "--reasoning-parser", "none", "--reasoning-field", "reasoning"]
ANSWERS += ["--tool-call-constraint", "schema"]


def test_serve_and_run_batch_read_them_alike():
    served = serve.parse_args(ANSWERS)
    batch = run_batch.make_parser().parse_args(["-i", "in", "-o", "out", *ANSWERS])
    assert batch.default_chat_template_kwargs == {"a": 1}
    for name in ("default_chat_template_kwargs", "response_role", "return_tokens_as_token_ids", "chat_template"):
        assert getattr(batch, name) == getattr(served, name)
    for name in ("tool_call_parser", "reasoning_parser", "exclude_tools_when_tool_choice_none"):
        assert getattr(batch, name) == getattr(served, name)
    assert (batch.reasoning_field, served.reasoning_field) == ("reasoning", "reasoning")
    assert (batch.tool_call_constraint, served.tool_call_constraint) == ("schema", "schema")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--default-chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--default-chat-template-kwargs", '{"messages": [], "a": 1}'], "cannot set messages; the request has fields"),
        (["--default-chat-template-kwargs", '{"tokenizer": 1}'], "cannot set tokenizer"),
        (["--response-role", ""], "must be a word of 1 to 64 characters"),
        (["--reasoning-field", "thoughts"], "invalid choice: 'thoughts'"),
        (["--tool-call-constraint", "json"], "invalid choice: 'json'"),
        (["--max-body-bytes", "0"], "must be a whole number of at least 1"),
    ],
)
def test_run_batch_refuses_what_serve_refuses(argv, message, capsys):
    with pytest.raises(SystemExit):
        run_batch.make_parser().parse_args(["-i", "in", "-o", "out", *argv])
    assert message in capsys.readouterr().err
