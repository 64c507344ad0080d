"""Every flag of `vllm serve` 0.32 is one here, is taken without effect, or is refused with its reason."""

import types
from pathlib import Path

import pytest

from rustvllm.cli.serve import make_parser, parse_args
from rustvllm.config.flags.refused import ALIASES, REFUSED, WITHOUT_EFFECT, rows
from rustvllm.server.launch import serve

FLAGS = [line.split() for line in (Path(__file__).parent / "vllm_serve_flags.txt").read_text().splitlines()]
"""Their names, a line for each argument; written down from the parser of vLLM 0.32."""
REFUSALS = list(rows(REFUSED))
TAKEN = list(rows(WITHOUT_EFFECT))


@pytest.fixture(scope="module")
def parser():
    return make_parser()


def test_no_flag_of_vllm_is_unknown(parser):
    known = parser._option_string_actions
    assert len(FLAGS) == 316
    assert [name for names in FLAGS for name in names if name not in known] == []


def test_the_tables_hold_flags_of_vllm_alone_and_each_once():
    listed = [name for names, _, _ in (*REFUSALS, *TAKEN) for name in names]
    vllms = {name for names in FLAGS for name in names} | {"-O", "-O0", "-O1", "-O2", "-O3"}
    assert len(listed) == len(set(listed))
    assert set(listed) | set(ALIASES) <= vllms
    assert all(len(reason) > 20 for _, _, reason in (*REFUSALS, *TAKEN))


def refusal(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("names", "neutral", "reason"), REFUSALS, ids=[names[0] for names, _, _ in REFUSALS])
def test_a_flag_is_refused_by_name_with_its_reason_unless_it_asks_for_nothing(
    names, neutral, reason, parser, monkeypatch, capsys
):
    monkeypatch.setattr("rustvllm.cli.serve.make_parser", lambda: parser)
    for name in names:
        for word in ([], ["something"]):
            told = refusal([name, *word], capsys)
            shown = ["***" for _ in word] if name == "--hf-token" else word
            assert " ".join([name, *shown]) in told
            assert shown == word or word[0] not in told
            assert "is not supported yet" in told
            if parser._option_string_actions[name].dest == "==SUPPRESS==":
                assert reason in " ".join(told.split())
        for value in neutral:
            parse_args([name, value])
        if name.startswith("--"):
            parse_args([name.replace("--", "--no-", 1)])


def test_flags_without_effect_take_any_value(parser, monkeypatch):
    monkeypatch.setattr("rustvllm.cli.serve.make_parser", lambda: parser)
    plain = vars(parse_args([]))
    for names, _, _ in TAKEN:
        for name in names:
            words = [name] if name.startswith("--no-") else [name, "1"]
            assert vars(parse_args(words)) == plain, name


def test_short_names_and_levels_pass():
    argv = ["-tp", "1", "-pp", "1", "-O3", "-q", "int8", "--device-memory-utilization", "0.5"]
    args = parse_args([*argv, "--limit-mm-per-prompt", '{"image": 0}', "--no-enable-prompt-tokens-details"])
    assert (args.quantization, args.gpu_memory_utilization, args.enable_prompt_tokens_details) == ("int8", 0.5, False)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--cpu-offload-gb", "2"], "rustvllm does not offload weights"),
        (["--fully-sharded-loras"], "adapters (--enable-lora) name their modules"),
        (["--kv-transfer-config", "kv.json"], "engines do not send each other KV blocks"),
    ],
)
def test_refusals_say_what_works(argv, says, capsys):
    assert says in " ".join(refusal(argv, capsys).split())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--dtype", "fp8"], "--dtype must be one of auto, float32"),
        (["-q", "hqq"], "--quantization must be one of int8"),
        (["-q", "awq"], "--quantization is awq, but rustvllm-tiny is not quantised: leave quantization out"),
        (
            ["--max-model-len", "4096"],
            "--max-model-len is 4096, but the model rustvllm-tiny supports at most 512 tokens",
        ),
        (["--enforce-eager", "--cudagraph-capture-sizes", "4"], "--cudagraph-capture-sizes and --enforce-eager"),
    ],
)
def test_values_are_checked_before_the_server_listens(argv, says, monkeypatch, capsys):
    for name in ("configure_logging", "raise_limit", "_listen"):
        monkeypatch.setattr(serve, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(serve, "serving_output", types.SimpleNamespace(begin=list, detach_handlers=list))
    calls = []
    assert serve.run_server(parse_args(argv)) == 1
    assert calls == ["configure_logging", "raise_limit"]
    assert says in capsys.readouterr().err
