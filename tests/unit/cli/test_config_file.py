"""``--config``: a YAML file says what a command line would, the command line wins, and what is wrong is named."""

import pytest

from rustvllm.cli.serve import parse_args
from rustvllm.config.engine_args import AsyncEngineArgs


@pytest.fixture
def parse(tmp_path):
    def run(text: str, *argv: str):
        file = tmp_path / "flags.yaml"
        file.write_text(text, encoding="utf-8")
        return parse_args([*argv, "--config", str(file)])

    return run


def engine_of(args):
    return AsyncEngineArgs.from_cli_args(args)


def test_every_kind_of_value(parse):
    args = parse("""
# Anything that has a flag
model: some/model
port: 9001
host: "0.0.0.0"
max_model_len: 8K
gpu-memory-utilization: 0.5
enable_prefix_caching: false
enforce-eager: true
enable-access-log: yes
headless: off
revision: 1.10
served-model-name: [first, second]
api-key: only
hf_overrides: {rope_scaling: {factor: 2.0, yarn: true}, name: x}
middleware: [a.b, c.d]
allowed-origins: ["https://a.example"]
tokenizer: null
cudagraph-capture-sizes:
  - 1
  - 2
""")
    engine = engine_of(args)
    assert (engine.model, engine.max_model_len, engine.gpu_memory_utilization) == ("some/model", 8192, 0.5)
    assert (engine.enable_prefix_caching, engine.enforce_eager, engine.revision) == (False, True, "1.10")
    assert engine.served_model_name == ["first", "second"]
    assert engine.hf_overrides == {"rope_scaling": {"factor": 2.0, "yarn": True}, "name": "x"}
    assert (engine.tokenizer, engine.cudagraph_capture_sizes) == (None, [1, 2])
    assert (args.port, args.host, args.api_key, args.headless) == (9001, "0.0.0.0", ["only"], False)
    assert (args.middleware, args.allowed_origins) == (["a.b", "c.d"], ("https://a.example",))
    assert args.enable_access_log


def test_the_command_line_wins(parse, capsys):
    text = "model: a\nport: 1\nengine-address: [unix:/a]\nenable_prefix_caching: false\nenable-log-requests: true\n"
    args = parse(
        text,
        *("b", "--port=2", "--engine_address", "unix:/b", "--enable-prefix-caching", "--disable-log-requests"),
    )
    assert (engine_of(args).model, args.port, args.engine_address) == ("b", 2, ["unix:/b"])
    assert engine_of(args).enable_prefix_caching
    assert not args.enable_log_requests
    assert capsys.readouterr().err == ""
    assert engine_of(parse(text, "--model", "c")).model == "c"
    assert engine_of(parse(text, "--model=c")).model == "c"


def test_the_model_may_have_its_other_name(parse):
    assert engine_of(parse("model_tag: m")).model == "m"
    assert engine_of(parse("model-tag: m", "n")).model == "n"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}"])
def test_an_empty_file_says_nothing(parse, text):
    assert parse(text).port == 8000


def test_json_is_yaml(parse):
    assert parse('{"port": 9, "allowed-origins": []}').port == 9
    assert parse('{"allowed-origins": []}').allowed_origins == ()


def test_a_value_may_begin_with_a_dash(parse):
    assert parse("api-key: -secret").api_key == ["-secret"]
    assert engine_of(parse("max-logprobs: -1")).max_logprobs == -1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "there is no flag for 'prot'; did you mean 'port'?"),
        ("max_modle_len: 1", "there is no flag for 'max_modle_len'; did you mean 'max-model-len'?"),
        ("zzzzzzzz: 1", "there is no flag for 'zzzzzzzz'"),
        ("config: other.yaml", "there is no flag for 'config'"),
        ("help: true", "there is no flag for 'help'"),
        ("port: [1, 2]", "port takes one value, got a list of 2"),
        ("port: true", "port takes a value, got true"),
        ("port: 99999", "0 to 65535"),
        ("headless: maybe", "headless is a switch: it must be true or false, got 'maybe'"),
        ("headless: [a]", "headless is a switch"),
        ("served-model-name: []", "served-model-name needs at least one value"),
        ("served-model-name: [a, [b]]", "a list may contain strings, numbers and objects"),
        ("served-model-name: [a, -b]", "none may begin with '-', got '-b'"),
        ("port: 1\nport: 2", "'port' appears twice"),
        ("max-model-len: 1\nmax_model_len: 2", "'max_model_len' appears twice"),
        ("- port", "must be a mapping"),
        ("port", "must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("a: !!python/object:os.system x", "there is no flag for 'a'"),
        ("hf-overrides: {a: !!python/name:os.system x}", "cannot be written as JSON"),
        ("hf-overrides: {a: .nan}", "cannot be written as JSON"),
        ("hf-overrides: &a {b: *a}", "cannot be written as JSON"),
        ("default-mm-loras: a=b", "--default-mm-loras a=b is not supported yet: adapters"),
        ("cpu-offload-gb: 2", "--cpu-offload-gb 2 is not supported yet"),
        ("[a, b]: c", "there is no flag for ''"),
    ],
)
def test_what_is_wrong_is_named(parse, capsys, text, says):
    with pytest.raises(SystemExit) as caught:
        parse(text)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_feature_to_come_that_is_switched_off_is_no_error(parse):
    assert parse("enable-log-deltas: false\ntensor_parallel_size: 1").port == 8000


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--config", "/nowhere/flags.yaml"], "cannot read --config /nowhere/flags.yaml: No such file"),
        (["--config", "/"], "cannot read --config /"),
        (["--config"], "--config needs the name of a YAML file"),
        (["--config", "--port", "1"], "--config needs the name of a YAML file"),
        (["--config=a", "--config=b"], "--config is given 2 times"),
    ],
)
def test_a_file_that_cannot_be_read(capsys, argv, says):
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_too_long(tmp_path, capsys):
    file = tmp_path / "long.yaml"
    file.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(SystemExit):
        parse_args(["--config", str(file)])
    assert "the limit is 1048576" in capsys.readouterr().err


def test_no_secret_of_the_file_is_in_an_error(parse, capsys):
    with pytest.raises(SystemExit):
        parse("api_keys: hf_abcdefghijklmnop")
    assert "abcdefgh" not in capsys.readouterr().err
