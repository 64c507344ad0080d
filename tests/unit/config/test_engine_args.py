"""Engine arguments: names, flags, defaults by use and device, and what is refused before anything is loaded."""

import argparse
import dataclasses
import json
import re

import pytest

from rustvllm.cli.parser import FlexibleArgumentParser
from rustvllm.config import devices, engine_args
from rustvllm.config.engine_args import AsyncEngineArgs, EngineArgs, default_budget
from rustvllm.config.flags.fields import parse_json_object, parse_number
from rustvllm.config.flags.refused import argument_names
from rustvllm.exceptions import ConfigError, ModelLoadError


@pytest.fixture
def model(tmp_path):
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 100,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(devices, "detect_device", lambda: "cpu")


def test_defaults_by_use(model):
    llm = EngineArgs(model=model).create_engine_config()
    assert (llm.scheduler.max_num_batched_tokens, llm.scheduler.max_num_seqs) == (4096, 256)
    server = AsyncEngineArgs(model=model).create_engine_config()
    assert (server.scheduler.max_num_batched_tokens, server.scheduler.max_num_seqs) == (2048, 128)
    assert llm.model.dtype == "float32"
    assert llm.device.device == "cpu"
    assert llm.model.max_model_len == 128
    assert llm.model.served_model_name == (model,)
    assert llm.cache.enable_prefix_caching
    assert llm.scheduler.enable_chunked_prefill
    assert llm.cache.block_size == 16


@pytest.mark.parametrize(
    ("gib", "usage", "budget"),
    [
        (180, "llm_class", (16384, 1024)),
        (180, "api_server", (16384, 1024)),
        (80, "llm_class", (16384, 1024)),
        (80, "api_server", (8192, 1024)),
        (24, "llm_class", (8192, 256)),
        (24, "api_server", (2048, 256)),
        (None, "api_server", (2048, 256)),
    ],
)
def test_defaults_by_gpu(monkeypatch, gib, usage, budget):
    monkeypatch.setattr(devices, "gpu_memory_bytes", lambda: gib and gib << 30)
    assert default_budget(usage, "cuda") == budget


def test_a_small_budget_brings_fewer_requests_along(model):
    scheduler = EngineArgs(model=model, max_num_batched_tokens=64).create_engine_config().scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (64, 64)


def test_few_requests_bring_a_small_budget_along(model):
    scheduler = EngineArgs(model=model, max_num_seqs=2).create_engine_config().scheduler
    assert scheduler.max_num_batched_tokens == 2 * 128


def test_many_requests_bring_a_large_budget_along(model):
    scheduler = EngineArgs(model=model, max_num_seqs=5000).create_engine_config().scheduler
    assert scheduler.max_num_batched_tokens == 5000


def test_without_chunked_prefill_the_default_budget_holds_a_prompt(model):
    args = EngineArgs(model=model, enable_chunked_prefill=False, max_num_seqs=1)
    assert args.create_engine_config().scheduler.max_num_batched_tokens >= 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 129}, "max_model_len is 129, but .* supports at most 128"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({"max_model_len": "8K"}, "max_model_len must be an integer"),
        ({"max_model_len": -2}, "max_model_len must be at least 1, got -2"),
        ({"model_impl": "vllm"}, "model_impl must be one of auto, rustvllm, transformers, got 'vllm'"),
        ({"hf_overrides": "{}"}, "hf_overrides must be a dict of values for config.json, got '{}'"),
        ({"hf_overrides": len}, "a function cannot be sent"),
        ({"hf_overrides": {"a": float("nan")}}, "hf_overrides must only hold values that JSON can express"),
        ({"hf_overrides": {"a": {1, 2}}}, "hf_overrides must only hold values that JSON can express"),
        ({"hf_overrides": {3: 1}}, "the keys of hf_overrides must be strings, got 3"),
        ({"trust_remote_code": "yes"}, "trust_remote_code must be true or false, got 'yes'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens must be at least 1, got -5"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 5}, "every running request needs one token"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"attention_backend": "flash"}, "attention_backend must be one of auto, triton, cpu, torch, got 'flash'"),
        ({"attention_backend": "cpu", "dtype": "float16"}, "but dtype is float16: set attention_backend to torch"),
        ({"load_format": "pt"}, "load_format must be one of"),
        ({"quantization": "hqq"}, "quantization must be one of int8, .*, gguf, awq, gptq, .* got 'hqq'"),
        ({"quantization": 8}, "quantization must be one of int8, .*, got 8"),
        ({"quantization": "int8", "dtype": "float16"}, "quantization needs the CPU's kernels, .* set dtype to"),
        ({"batch_invariant": True, "dtype": "float16"}, "batch_invariant needs .* but dtype is float16"),
        ({"batch_invariant": True, "attention_backend": "torch"}, "set attention_backend to cpu or auto"),
        ({"batch_invariant": "yes"}, "batch_invariant must be true or false, got 'yes'"),
        ({"cpu_threads": 0}, "cpu_threads must be at least 1, got 0"),
        ({"cpu_threads": 2.5}, "cpu_threads"),
        ({"scheduling_policy": "x"}, "scheduling_policy must be one of"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"num_gpu_blocks_override": 8}, "set max_model_len to 112 or less"),
        ({"block_size": 0}, "block_size"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"served_model_name": []}, "served_model_name"),
        ({"served_model_name": ["a", ""]}, "served_model_name"),
        ({"enforce_eager": 1}, "enforce_eager must be true or false, got 1"),
        ({"model": ""}, "model must be a non-empty string"),
        ({"tokenizer": "x", "skip_tokenizer_init": True}, "contradict"),
        ({"override_generation_config": "{}"}, "must be a dict"),
        ({"override_generation_config": {"temperature": -3}}, "has temperature -3: temperature must be"),
        ({"override_generation_config": {"top_k": "many"}}, "has top_k 'many': top_k must be"),
        ({"override_generation_config": {"max_new_tokens": -1}}, "has max_new_tokens -1: max_tokens must be"),
        ({"override_generation_config": {"eos_token_id": [2, "3"]}}, r"has eos_token_id \[2, '3'\]: it must"),
        ({"preemption_mode": "swap", "swap_space": 0}, "preemption_mode is swap, but swap_space is 0 GiB"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, r"must be at least max_model_len \(128\)"),
    ],
)
def test_wrong_arguments(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**{"model": model, **changes}).create_engine_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"scheduling_policy": "x"}, "scheduling_policy must be one of"),
        ({"seed": 2**63}, "seed must be at most"),
        ({"seed": "1"}, "seed must be an integer"),
        ({"max_num_seqs": 65537}, "max_num_seqs must be at most 65536"),
        ({"max_num_batched_tokens": 2**24 + 1}, "max_num_batched_tokens must be at most"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 5}, "every running request needs one token"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0"),
        ({"stream_interval": 0}, "stream_interval must be at least 1"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs must be at least 1"),
        ({"max_num_queued_tokens": -1}, "max_num_queued_tokens must be at least 0"),
        ({"queue_timeout": -0.5}, "queue_timeout must be at least 0 and less than"),
        ({"watermark": 1}, "watermark must be at least 0 and less than 1, got 1"),
        ({"preemption_mode": "drop"}, "preemption_mode must be one of recompute, swap, got 'drop'"),
        ({"preemption_mode": 5}, "preemption_mode must be one of recompute, swap, got 5"),
        ({"preemption_immunity_steps": -1}, "preemption_immunity_steps must be at least 0, got -1"),
        ({"max_look_past": -1}, "max_look_past must be at least 0, got -1"),
        ({"max_times_passed": "8"}, "max_times_passed must be an integer"),
        ({"prefix_caching_hash_algo": "md5"}, "prefix_caching_hash_algo must be one of builtin, sha256"),
        ({"swap_space": -1}, "swap_space must be at least 0 and less than"),
        ({"generation_config": "/no/such/folder"}, "generation_config names '/no/such/folder'"),
        ({"generation_config": "~no-such-user/x"}, "generation_config names"),
        ({"generation_config": "x" * 5000}, "generation_config names"),
        ({"generation_config": 5}, "generation_config must be auto, vllm, none"),
    ],
)
def test_what_needs_no_model_is_checked_before_one_is_looked_up(monkeypatch, changes, message):
    def resolve_model(*_, **__):
        pytest.fail("the model was looked up")

    monkeypatch.setattr(engine_args.hub, "resolve_model", resolve_model)
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model="acme/large", **changes).create_engine_config()


@pytest.mark.parametrize("form", ["auto", "vllm", "none", "folder", "file", "Path"])
def test_generation_config_may_be_a_choice_a_folder_or_a_file(model, tmp_path, form):
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.25}')
    source = {"folder": str(tmp_path), "file": str(file), "Path": file}.get(form, form)
    config = EngineArgs(model=model, generation_config=source).create_engine_config().model.generation_config
    assert config == ({} if form in ("vllm", "none") else {"temperature": 0.25})


@pytest.mark.parametrize("cls", [EngineArgs, AsyncEngineArgs])
def test_the_constructors_take_the_same_keywords_as_llm(cls):
    args = cls(model="m", tensor_parallel_size=1, disable_log_requests=True, seed=3)
    assert (type(args), args.model, args.seed) == (cls, "m", 3)
    assert dataclasses.replace(args, seed=4).seed == 4
    assert args == cls.from_kwargs(model="m", seed=3)
    with pytest.raises(ConfigError, match="cpu_offload_gb=2 is not supported yet"):
        cls(cpu_offload_gb=2)
    with pytest.raises(TypeError, match="no engine argument 'max_model_length'; did you mean 'max_model_len'"):
        cls(max_model_length=5)


def test_unknown_keyword_names_the_nearest():
    with pytest.raises(TypeError, match="'max_model_length'; did you mean 'max_model_len'"):
        EngineArgs.from_kwargs(max_model_length=5)
    with pytest.raises(TypeError, match=r"no engine argument 'zzz'$"):
        EngineArgs.from_kwargs(zzz=5)


def test_later_features_are_refused_by_name_unless_they_ask_for_nothing():
    assert EngineArgs.from_kwargs(tensor_parallel_size=1, quantization=None) == EngineArgs()
    with pytest.raises(ConfigError, match="cpu_offload_gb=2 is not supported yet"):
        EngineArgs.from_kwargs(cpu_offload_gb=2)
    with pytest.raises(ConfigError, match="cpu_offload_gb=False"):
        EngineArgs.from_kwargs(cpu_offload_gb=False)


def test_every_engine_argument_of_vllm_is_known_to_python_too():
    switched_off = {
        "disable_custom_all_reduce": True, "skip_mm_profiling": True, "hf_token": None, "enable_sleep_mode": False,
        "pooler_config": None, "config_format": "auto", "allowed_local_media_path": "",
        "structured_outputs_config": {"backend": "auto"},
        "compilation_config": 3,
    }  # fmt: skip
    assert EngineArgs(**switched_off) == EngineArgs()
    for name, value in {
        "enable_sleep_mode": True,
        "structured_outputs_config": {"backend": "guidance"},
        "max_num_scheduled_tokens": 64,
    }.items():
        with pytest.raises(ConfigError, match=f"^{name}={re.escape(repr(value))} is not supported yet: "):
            EngineArgs(**{name: value})
    with pytest.raises(ConfigError, match=r"^hf_token=\*\*\* is not supported yet: set the hub's token in"):
        EngineArgs(hf_token="hf_secret")


def test_none_is_the_default_of_any_argument():
    assert EngineArgs(**{field.name: None for field in dataclasses.fields(EngineArgs)}) == EngineArgs()


def test_no_argument_is_both_known_and_to_come():
    assert not {field.name for field in dataclasses.fields(EngineArgs)} & set(argument_names())


def parse(*argv, parser=None):
    parser = parser or FlexibleArgumentParser()
    return AsyncEngineArgs.from_cli_args(AsyncEngineArgs.add_cli_args(parser).parse_args(argv))


def test_every_argument_is_a_flag_and_defaults_survive_the_round_trip():
    assert parse() == AsyncEngineArgs()
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    for field in dataclasses.fields(EngineArgs):
        assert "--" + field.name.replace("_", "-") in parser._option_string_actions
        assert "--" + field.name in parser._option_string_actions


@pytest.mark.parametrize("parser_class", [argparse.ArgumentParser, FlexibleArgumentParser])
def test_max_model_len_may_be_left_to_the_kv_cache(parser_class):
    for text in ("auto", "-1"):
        config = parse(f"--max-model-len={text}", parser=parser_class()).create_engine_config()
        assert (config.model.max_model_len, config.model.fit_max_model_len) == (512, True)
    config = EngineArgs(max_model_len="auto", num_gpu_blocks_override=4, block_size=8).create_engine_config()
    fitted = config.fitted(4)
    assert (fitted.model.max_model_len, fitted.model.fit_max_model_len) == (24, False)
    assert config.fitted(1000) is config
    fixed = EngineArgs(max_model_len=100).create_engine_config()
    assert fixed.fitted(4) is fixed


@pytest.mark.parametrize("parser_class", [argparse.ArgumentParser, FlexibleArgumentParser])
def test_hf_overrides_on_the_command_line(parser_class):
    config = parse("--hf-overrides", '{"max_position_embeddings": 64}', parser=parser_class()).create_engine_config()
    assert config.model.hf_config["max_position_embeddings"] == 64
    with pytest.raises(SystemExit):
        parse("--hf-overrides", "{", parser=parser_class())


@pytest.mark.parametrize("parser_class", [argparse.ArgumentParser, FlexibleArgumentParser])
@pytest.mark.parametrize("flag", ["--max-model-len", "--max_model_len"])
def test_dashes_and_underscores(parser_class, flag):
    assert parse(flag, "8K", parser=parser_class()).max_model_len == 8192
    assert parse(f"{flag}=1k", parser=parser_class()).max_model_len == 1000


@pytest.mark.parametrize("form", ["--no-enable-prefix-caching", "--no_enable_prefix_caching"])
def test_switches(form):
    assert parse(form).enable_prefix_caching is False
    assert parse("--enable-prefix-caching").enable_prefix_caching is True
    assert parse("--enforce-eager").enforce_eager is True


def test_what_happens_when_blocks_are_short(model):
    flags = "--preemption-mode swap --swap-space 0.5 --preemption-immunity-steps 2 --max-look-past 3"
    args = parse("--model", model, *flags.split(), "--max-times-passed=1k", "--watermark", "0.05")
    config = args.create_engine_config()
    assert config.cache.swap_space == 0.5
    scheduler = config.scheduler
    assert (scheduler.preemption_mode, scheduler.preemption_immunity_steps) == ("swap", 2)
    assert (scheduler.max_look_past, scheduler.max_times_passed, scheduler.watermark) == (3, 1000, 0.05)
    for given, expected in [({}, 8), ({"enable_lora": True}, 64), ({"enable_lora": True, "max_times_passed": 3}, 3)]:
        assert EngineArgs(model=model, **given).create_engine_config().scheduler.max_times_passed == expected
    hashed = parse("--model", model, "--prefix-caching-hash-algo", "sha256_cbor").create_engine_config()
    assert hashed.cache.hash_algorithm == "sha256"
    # Swap space without swapping asks for nothing: what used to be a default elsewhere is let through.
    assert EngineArgs(model=model, swap_space=4).create_engine_config().scheduler.preemption_mode == "recompute"


def test_lists_and_json():
    args = parse("--served-model-name", "a", "b", "--override-generation-config", '{"temperature": 0}')
    assert args.served_model_name == ["a", "b"]
    assert args.override_generation_config == {"temperature": 0}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-model-len", "many"], "must be a whole number"),
        (["--cpu-offload-gb", "2"], "--cpu-offload-gb 2 is not supported yet"),
        (["--cpu_offload_gb=2"], "not supported yet"),
        (["--enable-prompt-embeds"], "--enable-prompt-embeds is not supported yet"),
        (["--override-generation-config", "[]"], "must be a JSON object"),
    ],
)
def test_wrong_flags_end_with_usage(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_neutral_flags_of_later_features_are_let_through():
    assert (
        parse("--tensor-parallel-size", "1", "--no-enable-prompt-embeds", "--kv-cache-dtype", "auto")
        == AsyncEngineArgs()
    )
    assert parse("--disable-log-requests", "--no-enable-log-requests") == AsyncEngineArgs()


@pytest.mark.parametrize(
    "flags",
    [
        ["--enable-prompt-embeds", "--enable_prompt_embeds"],
        ["--no-enable-prompt-embeds"],
        ["--enable-prompt-embeds", "--enable_prompt_embeds", "--no-enable-prompt-embeds", "--no-enable_prompt_embeds"],
        ["--task"],  # without an underscore there is one form only
    ],
)
def test_flags_that_the_caller_has_are_left_to_it(flags):
    parser = argparse.ArgumentParser()
    parser.add_argument(*flags, dest="own", action="store_true")
    AsyncEngineArgs.add_cli_args(parser)
    for flag in flags:
        args = parser.parse_args([flag])
        assert args.own is True
        assert AsyncEngineArgs.from_cli_args(args) == AsyncEngineArgs()
    assert [action.dest for action in parser._actions if not action.option_strings] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("2M", 2 << 20),
        ("1.5k", 1500),
        ("-1", -1),
        ("25.6k", 25600),
    ],
)
def test_parse_number(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "0x10", "1kk", "nan", "9" * 40, "1.0005k", "١"])
def test_parse_number_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        parse_number(text)


def test_parse_json_object_survives_depth():
    with pytest.raises(argparse.ArgumentTypeError, match="JSON object"):
        parse_json_object("[" * 100_000)


def test_names_of_a_hub_model_are_all_served(model, monkeypatch, tmp_path):
    found = engine_args.hub.ResolvedModel("gpt-2", tmp_path, ("openai-community/gpt2", "gpt2"))
    monkeypatch.setattr(engine_args.hub, "resolve_model", lambda *_, **__: found)
    names = EngineArgs(model="gpt-2").create_engine_config().model.served_model_name
    assert names == ("gpt-2", "openai-community/gpt2", "gpt2")
    own = EngineArgs(model="gpt-2", served_model_name=["x", "y", "x"]).create_engine_config().model.served_model_name
    assert own == ("x", "y")


def test_a_wrong_model_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        EngineArgs(model=str(tmp_path)).create_engine_config()


def test_torch_with_cuda_is_told_from_its_version_file(monkeypatch, tmp_path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for text, expected in [
        ("cuda: Optional[str] = '13.0'\n", True),
        ("cuda = None\n", False),
        ("cuda: Optional[str] = None\nhip = None\n", False),
    ]:
        (package / "version.py").write_text(text)
        assert devices.torch_has_cuda() is expected


def test_cuda_graph_sizes_and_mode(model):
    def graphs(**options):
        return EngineArgs(model=model, skip_tokenizer_init=True, **options).create_engine_config().cuda_graphs

    assert graphs().capture_sizes is None
    assert graphs().capture_mode == "ahead"
    assert graphs(cudagraph_capture_sizes=[8, 1, 8]).capture_sizes == (1, 8)
    assert graphs(enforce_eager=True).capture_sizes == ()
    assert graphs(cudagraph_capture_mode="lazy").capture_mode == "lazy"
    assert graphs(cudagraph_mixed_tokens=0).max_mixed_tokens == 0
    for wrong, message in (
        ({"cudagraph_capture_sizes": []}, "one or more numbers of requests, got \\[\\]; enforce_eager turns"),
        ({"cudagraph_capture_sizes": 8}, "one or more numbers of requests, got 8"),
        ({"cudagraph_capture_sizes": [0]}, "cudagraph_capture_sizes must be at least 1, got 0"),
        ({"cudagraph_capture_sizes": ["a"]}, "cudagraph_capture_sizes must be an integer, got 'a'"),
        ({"cudagraph_capture_sizes": [9], "max_num_seqs": 8}, r"has 9, but a step has at most max_num_seqs \(8\)"),
        ({"cudagraph_capture_sizes": [8], "enforce_eager": True}, "contradict each other"),
        ({"cudagraph_mixed_tokens": -1}, "cudagraph_mixed_tokens must be at least 0, got -1"),
        ({"cudagraph_mixed_tokens": "all"}, "cudagraph_mixed_tokens must be an integer, got 'all'"),
        ({"cudagraph_capture_mode": "never"}, "cudagraph_capture_mode must be one of ahead, lazy, got 'never'"),
    ):
        with pytest.raises(ConfigError, match=message):
            graphs(**wrong)


def test_steps_overlap_where_the_device_runs_by_itself(model, monkeypatch):
    monkeypatch.setattr(devices, "gpu_memory_bytes", lambda: 80 << 30)

    def overlap(**options):
        args = EngineArgs(model=model, skip_tokenizer_init=True, **options)
        return args.create_engine_config().scheduler.async_scheduling

    assert overlap(device="cuda")
    assert not overlap(device="cuda", async_scheduling=False)
    assert not overlap(device="cpu")
    assert overlap(device="cpu", async_scheduling=True)
    assert overlap(executor="sim")


@pytest.mark.parametrize("variable", ["", "1"])
def test_a_switch_overrules_its_variable(model, monkeypatch, variable):
    monkeypatch.setenv("RUSTVLLM_TRACE", variable)

    def is_traced(*flags):
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        args = AsyncEngineArgs.from_cli_args(parser.parse_args([*flags, "--model", model]))
        return args.create_engine_config().tracing.log

    assert is_traced() == bool(variable)
    assert is_traced("--trace")
    assert not is_traced("--no-trace")
