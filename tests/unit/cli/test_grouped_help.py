"""``rustvllm serve --help`` in its forms: groups, one of them, all flags, flags with a word in them."""

import pytest

from rustvllm.cli.grouped_help import groups
from rustvllm.cli.main import main
from rustvllm.cli.serve import make_parser


def shown(capsys, *argv: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *argv])
    assert caught.value.code == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def titles() -> list[str]:
    return [title for title, _ in groups(make_parser())]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_by_itself_it_lists_every_flag_by_group(capsys, flag):
    text = shown(capsys, flag)
    assert {"server", "browsers", "TLS", "logging", "model", "cache", "scheduler"} <= set(titles())
    for title, actions in groups(make_parser()):
        assert f"\n  {title}\n" in text
        for action in actions:
            assert action.option_strings[0] in text.split()
    assert "--help=all" in text
    assert "MODEL" in text
    assert "--tool-parser-plugin" not in text


def test_all_says_what_each_is_for(capsys):
    text = shown(capsys, "--help=all")
    for _, actions in groups(make_parser()):
        for action in actions:
            assert action.option_strings[0] in text
    assert "port to listen on; 0 takes a free one (default: 8000)" in " ".join(text.split())


@pytest.mark.parametrize("what", ["--help=TLS", "--help=tls"])
def test_a_group(capsys, what):
    text = shown(capsys, what)
    assert text.startswith("TLS:\n")
    assert "--ssl-keyfile" in text
    assert "--port" not in text


@pytest.mark.parametrize("what", ["port", "--port"])
def test_a_flag_by_its_whole_name(capsys, what):
    text = shown(capsys, f"--help={what}")
    assert text.startswith("server:\n  --port")
    assert "--host" not in text


def test_a_flag_in_either_spelling(capsys):
    assert shown(capsys, "--help=max_model_len") == shown(capsys, "--help", "max-model-len")


def test_a_word(capsys):
    text = shown(capsys, "--help=prefix-caching")
    assert "--enable-prefix-caching" in text
    assert "--prefix-caching-hash-algo" in text
    assert "--port" not in text
    assert "--kv-cache-memory-bytes" in shown(capsys, "--help=kv cache")


def test_nothing_like_it(capsys):
    text = shown(capsys, "--help=zzz", code=2)
    assert "no flag or group matches 'zzz'" in text
    assert "scheduler" in text
