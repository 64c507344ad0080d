"""The flags of the server's front end: what each takes, what it becomes, what it refuses and in which words."""

import argparse

import pytest

from rustvllm.cli.serve import make_parser, parse_args
from rustvllm.exceptions import ConfigError
from rustvllm.server.flags.http_settings import CorsSettings, HttpSettings, TlsSettings
from rustvllm.server.flags.log_args import RequestLogSettings
from rustvllm.server.flags.settings import ServerSettings


def settings(*argv: str) -> ServerSettings:
    return ServerSettings.from_args(parse_args(argv))


def test_defaults():
    assert settings() == ServerSettings()
    assert settings().http == HttpSettings()
    assert settings().http.cors == CorsSettings((), ("*",), ("*",), credentials=False)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--allowed-origins", "*"], CorsSettings(("*",))),
        (
            ["--allowed-origins", '["https://a.example", "http://b:81"]'],
            CorsSettings(("https://a.example", "http://b:81")),
        ),
        (["--allowed_origins", "https://a.example", "null"], CorsSettings(("https://a.example", "null"))),
        (["--allowed-origins=[]"], CorsSettings(())),
        (["--allowed-origins", "http://[::1]:3000"], CorsSettings(("http://[::1]:3000",))),
        (["--allowed-origins", "*", "--allowed-methods", "GET", "POST"], CorsSettings(("*",), methods=("GET", "POST"))),
        (
            ["--allowed-origins", "*", "--allowed-headers", '["X-Own", "Authorization"]'],
            CorsSettings(("*",), headers=("X-Own", "Authorization")),
        ),
        (["--allowed-origins", "*", "--allow-credentials"], CorsSettings(("*",), credentials=True)),
        (["--allowed-methods", "*", "--allowed-headers", "*"], CorsSettings()),
    ],
)
def test_cors(argv, expected):
    assert settings(*argv).http.cors == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--allowed-hosts", "llm.example.org", "*.Example.com"], ("llm.example.org", "*.Example.com")),
        (["--allowed-hosts", '["a", "10.0.0.1", "[FD00::0:1]", "fd00::2"]'], ("a", "10.0.0.1", "fd00::1", "fd00::2")),
        (["--allowed-hosts", "*"], ("*",)),
    ],
)
def test_allowed_hosts(argv, expected):
    assert settings(*argv).http.allowed_hosts == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--ssl-certfile", "c.pem"], TlsSettings("c.pem")),
        (
            ["--ssl-certfile", "c", "--ssl-keyfile", "k", "--ssl-ca-certs", "a", "--ssl-cert-reqs", "2"],
            TlsSettings("c", "k", "a", 2),
        ),
        (["--ssl-certfile=c", "--ssl-ca-certs=a", "--ssl-cert-reqs=OPTIONAL"], TlsSettings("c", None, "a", 1)),
        (
            ["--ssl-certfile=c", "--ssl-ciphers", "HIGH", "--enable-ssl-refresh"],
            TlsSettings("c", ciphers="HIGH", refresh=True),
        ),
    ],
)
def test_tls(argv, expected):
    assert settings(*argv).http.tls == expected


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--allowed-methods", "GET"], "--allowed-methods needs --allowed-origins"),
        (["--allowed-headers", "X-Own"], "--allowed-headers needs --allowed-origins"),
        (["--allow-credentials"], "--allow-credentials needs --allowed-origins"),
        (["--ssl-keyfile", "k"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-ca-certs", "k"], "--ssl-ca-certs needs --ssl-certfile"),
        (["--ssl-cert-reqs", "1"], "--ssl-cert-reqs needs --ssl-certfile"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh needs --ssl-certfile"),
        (["--ssl-certfile", "c", "--ssl-cert-reqs", "2"], "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        (["--enable-log-outputs"], "--enable-log-outputs needs --enable-log-requests"),
        (["--api-key", ""], "key 1 is empty"),
        (["--api-key", "good", "bad key"], "key 2 contains a space"),
        (["--api-key", "bad\x01key"], "control character"),
    ],
)
def test_flags_that_do_not_go_together(argv, says):
    with pytest.raises(ConfigError, match=says):
        settings(*argv)


def test_the_rest_of_the_http_layer():
    found = settings(
        *("--middleware", "a.b", "--middleware", "c.d.E", "--enable-request-id-headers"),
        *("--h11-max-incomplete-event-size", "1024", "--h11-max-header-count", "1"),
        *("--api-key-exempt", "/metrics", "/dashboard", "--disable-access-log-for-endpoints", "/health, /metrics,"),
    )
    assert found.http == HttpSettings(
        middleware=("a.b", "c.d.E"),
        request_id_headers=True,
        max_head_bytes=1024,
        max_header_count=1,
        keyless_paths=("/metrics", "/dashboard"),
        quiet_paths=("/health", "/metrics"),
    )


def test_answers():
    found = settings(
        *("--response-role", "model", "--chat-template-content-format", "openai"),
        *("--return_tokens_as_token_ids", "--sse-keep-alive-interval", "0"),
    )
    assert settings("--default-chat-template-kwargs", '{"a": 1}').default_chat_template_kwargs == {"a": 1}
    assert (found.response_role, found.chat_template_content_format) == ("model", "openai")
    assert (found.return_tokens_as_token_ids, found.sse_keep_alive_interval) == (True, 0)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], RequestLogSettings()),
        (["--enable-log-requests"], RequestLogSettings(requests=True)),
        (["--enable-log-requests", "--enable-log-outputs", "--max-log-len", "0"], RequestLogSettings(True, True, 0)),
        (["--enable-log-requests", "--disable-log-requests"], RequestLogSettings()),
        (["--disable-log-requests", "--enable-log-requests"], RequestLogSettings(requests=True)),
        (["--no_enable_log_requests"], RequestLogSettings()),
        (["--max-log-len", "80"], RequestLogSettings(max_len=80)),
    ],
)
def test_logging_of_requests(argv, expected):
    assert settings(*argv).request_log == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], False),
        (["--enable-access-log"], True),
        (["--disable-uvicorn-access-log"], False),
        (["--enable-access-log", "--disable-uvicorn-access-log"], False),
    ],
)
def test_the_access_log_is_off_unless_asked_for(argv, expected):
    assert settings(*argv).enable_access_log is expected


def test_keys_come_from_the_command_line_or_the_environment(monkeypatch):
    assert settings().api_keys == ()
    monkeypatch.setenv("RUSTVLLM_API_KEY", " one two\nthree ")
    assert settings().api_keys == ("one", "two", "three")
    assert settings("--api-key", "schlüssel", "b").api_keys == ("schlüssel", "b")
    monkeypatch.setenv("RUSTVLLM_API_KEY", "")
    assert settings().api_keys == ()


def test_keys_of_a_file_have_weights(monkeypatch, tmp_path):
    path = tmp_path / "keys"
    path.write_text("# KEY WEIGHT\n\nfirst 3\n  schl\u00fcssel\nlast 1000\r\n", encoding="utf-8")
    found = settings("--api-key-file", str(path))
    assert (found.api_keys, found.key_weights) == (("first", "schl\u00fcssel", "last"), (3, 1, 1000))
    assert "first" not in repr(found)
    found = settings("--api-key", "given", "--api-key-file", str(path))
    assert (found.api_keys[:2], found.key_weights[:2]) == (("given", "first"), (1, 3))
    monkeypatch.setenv("RUSTVLLM_API_KEY", "variable")
    assert settings("--api-key-file", str(path)).api_keys[0] == "variable"


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path):
    (tmp_path / "keys").write_text("\ufefffirst 3\n", encoding="utf-8")
    assert settings("--api-key-file", str(tmp_path / "keys")).api_keys == ("first",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("good 1\nhush 0", "line 2: the weight must be a whole number from 1 to 1000, got '0'"),
        ("hush 1001", "line 1: the weight must be a whole number from 1 to 1000, got '1001'"),
        ("hush -1", "got '-1'"),
        ("hush 1.5", "got '1.5'"),
        ("hush 1e3", "got '1e3'"),
        ("hush 99999999999999999999", "line 1: the weight must be a whole number from 1 to 1000, got another word"),
        ("hush hush2", "got another word"),
        ("hush 1 2", "line 1: has 3 words, but a line has one key, and optionally its weight"),
        ("hush 1\n\nhush 2", "line 3: repeats the key of line 1"),
        ("hu\u0001sh 1", "line 1: the key contains a space or a control character"),
        ("# hush\n", "the file has no key"),
        ("given 1", "it repeats key 1 of --api-key"),
    ],
)
def test_a_file_of_keys_that_is_wrong(tmp_path, text, says):
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        settings("--api-key", "given", "--api-key-file", str(path))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"--api-key-file {path}: ")
    assert "hush" not in str(caught.value).replace(str(path), "")


def test_a_file_of_keys_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read --api-key-file .*: No such file or directory"):
        settings("--api-key-file", str(tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"hush\xff")
    with pytest.raises(ConfigError, match=r"cannot read --api-key-file .*: invalid start byte$"):
        settings("--api-key-file", str(tmp_path / "bytes"))


@pytest.mark.parametrize("path", ["", "/a", "/a/b"])
def test_root_path(path):
    assert settings("--root-path", path).root_path == path


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--allowed-hosts", "https://a.example"], "without scheme and port, or *, got 'https://a.example'"),
        (["--allowed-hosts", "a.example:8000"], "a host must be a name"),
        (["--allowed-hosts", "a.*.example"], "a host must be a name"),
        (["--allowed-hosts", "a", "[::1]:80"], "a host must be a name"),
        (["--allowed-hosts", "[7]"], "a host must be a name"),
        (["--allowed-origins", "https://a.example/"], "without a path, or *, got 'https://a.example/'"),
        (["--allowed-origins", "a.example"], "an origin must be scheme://host"),
        (["--allowed-origins", "https://a:b@c"], "an origin must be"),
        (["--allowed-origins", "http://a:99999"], "an origin must be"),
        (["--allowed-origins", "[oops"], "not a JSON list"),
        (["--allowed-origins", "[1]"], "an origin must be"),
        (["--allowed-methods", "post"], "must be a method such as POST"),
        (["--allowed-headers", "a b"], "must be the name of a header"),
        (["--ssl-cert-reqs", "3"], "must be 0 (none), 1 (optional) or 2 (required), got '3'"),
        (["--middleware", "nodot"], "as module.name"),
        (["--middleware", "a.b; c"], "as module.name"),
        (["--h11-max-incomplete-event-size", "1023"], "from 1024 to 67108864, got '1023'"),
        (["--h11-max-header-count", "0"], "from 1 to 10000, got '0'"),
        (["--h11-max-header-count", "9" * 50], "from 1 to 10000"),
        (["--api-key-exempt", "metrics"], "must be a path such as /metrics, got 'metrics'"),
        (["--api-key-exempt", "/v1/*"], "must be a path"),
        (["--default-chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--enable-log-deltas"], "--enable-log-deltas is not supported yet"),
        (["--response-role", " "], "a word of 1 to 64 characters"),
        (["--chat-template-content-format", "xml"], "invalid choice: 'xml'"),
        (["--sse-keep-alive-interval", "-1"], "seconds from 0"),
        (["--sse-keep-alive-interval", "nan"], "seconds from 0"),
        (["--max-log-len", "-1"], "at least 0, got '-1'"),
        (["--log-format", "xml"], "invalid choice: 'xml'"),
        (["--disable-access-log-for-endpoints", "health"], "must be paths such as /health,/metrics"),
        (["--lora-hub", "a/b/c"], "must be an owner on the hub, OWNER/NAME or *, got 'a/b/c'"),
        (["--lora-hub", "acme", "**"], "or *, got '**'"),
        (["--root-path", "a"], "must begin with / and not end with /"),
        (["--root-path", "/a/"], "must begin with / and not end with /"),
        *((["--root-path", f"/a{sign}b"], f"without a space, ?, # and %, got '/a{sign}b'") for sign in " ?#%"),
        (["--tool-call-parser", "x"], "has no format 'x'; the formats are auto, none, "),
        (["--reasoning-parser", "hermes"], "has no format 'hermes'; the formats are auto, none, "),
        (["--tool-parser-plugin", "x.py"], "--tool-parser-plugin x.py is not supported yet"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(capsys, argv, says):
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_dashes_and_underscores_mean_the_same_in_every_flag():
    """Every visible flag with several words, its --no- form included, is found under both spellings."""
    parser = make_parser()
    flags = [
        (flag, action)
        for action in parser._actions
        for flag in action.option_strings
        if flag.count("-") > 2 and action.help is not argparse.SUPPRESS
    ]
    assert len(flags) > 60
    assert any(flag.startswith("--no-") for flag, _ in flags)
    for flag, action in flags:
        value = [] if action.nargs == 0 else ["1"]
        try:
            made = [vars(make_parser().parse_known_args([spelt, *value])[0]) for spelt in (flag, _underscored(flag))]
        except SystemExit:  # one that does not take "1"; it was found
            continue
        assert made[0] == made[1], flag


def _underscored(flag: str) -> str:
    return "--" + flag.removeprefix("--").replace("-", "_")
