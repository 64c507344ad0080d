"""Reading a model's folder: what is derived, and what each kind of broken configuration says."""

import json

import pytest

from rustvllm.config.model_folder import read_model_config, resolve_dtype
from rustvllm.exceptions import ConfigError, ModelLoadError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}


@pytest.fixture
def folder(tmp_path):
    def write(config, **files):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        for name, value in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return write


def read(path, **options):
    return read_model_config(path, model="m", **options)


def test_llama(folder):
    config = read(folder(LLAMA))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_attention_heads, config.num_kv_heads, config.head_dim) == (2, 8, 4, 8)
    assert (config.max_model_len, config.eos_token_ids, config.dtype) == (512, (2,), "float32")


def test_gpt2(folder):
    config = read(folder(GPT2))
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.max_model_len) == (2, 4, 16, 128)
    assert config.eos_token_ids == ()


def test_explicit_head_dim_and_kv_heads_default(folder):
    config = read(folder({**LLAMA, "num_key_value_heads": None, "head_dim": 16}))
    assert (config.num_kv_heads, config.head_dim) == (8, 16)


def test_model_type_stands_for_a_missing_architecture(folder):
    assert read(folder({**GPT2, "architectures": None, "model_type": "gpt2"})).architecture == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FrogForImages"]}, "FrogForImages; supported are Dots1ForCausalLM, GPT2LMHeadModel"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "it keeps a recurrent state"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "it adds ALiBi biases inside"),
        ({"architectures": ["BartForCausalLM"], "is_encoder_decoder": True}, "an encoder-decoder model"),
        (
            {"architectures": ["FrogForCausalLM"], "vocab_size": None},
            "lacks vocab_size, which Frog",
        ),
        ({"architectures": None, "model_type": "bert"}, "model_type bert; supported are"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": "LlamaForCausalLM"}, "names no architecture"),
        ({"hidden_size": None, "num_hidden_layers": None}, "lacks hidden_size, num_hidden_layers, which Llama"),
        ({"vocab_size": "100"}, "vocab_size must be a positive integer, got '100'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 4097}, "num_hidden_layers is 4097, but the limit is 4096 layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": 65}, "not a multiple of num_attention_heads 8"),
        ({"eos_token_id": "two"}, "eos_token_id must hold token ids"),
    ],
)
def test_broken_values_are_named(folder, changes, message):
    path = folder({**LLAMA, **changes})
    with pytest.raises(ModelLoadError, match=message) as caught:
        read(path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\ufeff{}x", "[" * 100_000])
def test_broken_json(folder, text):
    with pytest.raises(ModelLoadError, match=r"config.json"):
        read(folder(text))


def test_missing_config(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        read(tmp_path)


def test_huge_config_is_not_read(folder, tmp_path):
    path = folder(LLAMA)
    with (path / "config.json").open("ab") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(ModelLoadError, match="the limit is"):
        read(path)


def test_whose_modelling_code_runs(folder):
    frog = {**LLAMA, "architectures": ["Frog", "FrogForCausalLM"], "model_type": "frog"}
    assert read(folder(LLAMA)).model_impl == "rustvllm"
    assert read(folder(LLAMA), model_impl="transformers").model_impl == "transformers"
    config = read(folder(frog))
    assert (config.architecture, config.model_impl) == ("FrogForCausalLM", "transformers")
    with pytest.raises(ModelLoadError, match="Frog, FrogForCausalLM; with --model-impl rustvllm supported are Dots1"):
        read(folder(frog), model_impl="rustvllm")


def test_overrides_win_and_are_merged_into_objects(folder):
    path = folder({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "eos_token_id": 2})
    overrides = {"rope_scaling": {"factor": 4.0, "new": None}, "vocab_size": 50, "eos_token_id": [3], "more": {"a": 1}}
    config = read(path, hf_overrides=overrides)
    assert config.hf_config["rope_scaling"] == {"type": "linear", "factor": 4.0, "new": None}
    assert (config.vocab_size, config.max_model_len, config.eos_token_ids) == (50, 2048, (3,))
    assert config.hf_config["more"] == {"a": 1}
    assert json.loads((path / "config.json").read_text())["rope_scaling"] == {"type": "linear", "factor": 2.0}
    with pytest.raises(ModelLoadError, match="vocab_size must be a positive integer, got 'x'"):
        read(path, hf_overrides={"vocab_size": "x"})
    assert read(folder({**LLAMA, "architectures": None}), hf_overrides={"architectures": ["LlamaForCausalLM"]})


def test_max_model_len(folder):
    path = folder(LLAMA)
    assert read(path, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len is 513, but the model m supports at most 512 tokens"):
        read(path, max_model_len=513)


YARN = {"type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 256),
        (LLAMA3 | {"original_max_position_embeddings": 64}, 512),
        ({"rope_type": "default"}, 512),
        ({"rope_type": "yarn", "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 0.5, "beta_fast": 0, "beta_slow": None, "truncate": False}, 512),
        ({"rope_type": "mystery", "factor": "x"}, 512),  # whose class says what it takes
    ],
)
def test_rope_scaling_lengthens(folder, scaling, longest):
    assert read(folder({**LLAMA, "rope_scaling": scaling})).max_model_len == longest
    assert read(folder({**LLAMA, "rope_parameters": scaling})).max_model_len == longest


def test_generation_config(folder, tmp_path):
    path = folder(LLAMA, generation_config={"eos_token_id": [1, 2, 1], "temperature": 0.6})
    config = read(path)
    assert config.eos_token_ids == (1, 2)
    assert config.generation_config["temperature"] == 0.6
    assert read(path, generation_config="vllm").generation_config == {}
    assert read(path, generation_config="vllm").eos_token_ids == (2,)
    assert read(path, override_generation_config={"top_k": 3}).generation_config["top_k"] == 3
    assert read(path, generation_config=str(path)).eos_token_ids == (1, 2)
    with pytest.raises(ConfigError, match="there is no"):
        read(path, generation_config=str(tmp_path / "nowhere"))


def test_eos_outside_the_vocabulary_never_ends_anything(folder):
    assert read(folder({**LLAMA, "eos_token_id": [2, 50256]})).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("dtype", "device", "stored", "expected"),
    [
        ("auto", "cpu", "bfloat16", "float32"),
        ("auto", "cuda", "bfloat16", "bfloat16"),
        ("auto", "cuda", "torch.float16", "float16"),
        ("auto", "cuda", "float32", "float16"),
        ("half", "cpu", None, "float16"),
        ("float", "cuda", None, "float32"),
        ("bfloat16", "cpu", None, "bfloat16"),
        ("torch.float16", "cpu", None, "float16"),  # what torch.float16 is as text
    ],
)
def test_dtype(dtype, device, stored, expected):
    assert resolve_dtype(dtype, device, {"torch_dtype": stored}) == expected


def test_unknown_dtype():
    with pytest.raises(ConfigError, match="got 'int4'"):
        resolve_dtype("int4", "cpu", {})


def test_reference_models(shared_dir):
    llama = read(shared_dir / "data/stories260K/hf")
    assert (llama.max_model_len, llama.head_dim, llama.eos_token_ids) == (512, 8, (1, 2))
    gpt2 = read(shared_dir / "data/slm4096-gpt2/hf")
    assert (gpt2.max_model_len, gpt2.vocab_size, gpt2.eos_token_ids) == (128, 54, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (str(2**31), f"n_positions is {2**31}, but may be at most {2**31 - 1}"),
        (str(2**63), f"n_positions is {2**63}, but may be at most {2**31 - 1}"),
        ("1" + "0" * 400, "not valid JSON: a number has 401 digits, but the limit is 300"),
        ("1e400", "n_positions must be a positive integer, got inf"),
        ("NaN", "n_positions must be a positive integer, got nan"),
        ("128.0", "n_positions must be a positive integer, got 128.0"),
        ("-1", "n_positions must be a positive integer, got -1"),
        ("true", "n_positions must be a positive integer, got True"),
    ],
)
def test_a_number_out_of_range_names_the_range(folder, text, message):
    path = folder(json.dumps({**GPT2, "n_positions": "@"}).replace('"@"', text))
    with pytest.raises(ModelLoadError) as raised:
        read(path)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize("factor", [str(2**31), "1e300"])
def test_a_scaling_that_cannot_be_counted(folder, kind, factor):
    scaling = {"type": kind, "factor": "@", "original_max_position_embeddings": 512}
    path = folder(json.dumps({**LLAMA, "rope_scaling": scaling}).replace('"@"', factor))
    with pytest.raises(
        ModelLoadError, match=r"the rope scaling factor .* turns 512 positions into .*, but the limit is"
    ):
        read(path)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        *(
            (
                {"type": kind, "factor": factor},
                f"rope type '{kind}' needs a positive number 'factor', which is {factor!r}",
            )
            for kind in ("linear", "dynamic", "yarn", "llama3", "longrope")
            for factor in (0, -2.0, NAN, INF, "2", True, [2])
        ),
        ({"type": "linear"}, "'linear' needs a positive number 'factor', which is missing"),
        *(
            (
                YARN | {"original_max_position_embeddings": trained},
                f"'original_max_position_embeddings', which is {trained!r}",
            )
            for trained in (0, -1, "512", NAN)
        ),
        (
            YARN | {"original_max_position_embeddings": 2**40},
            "has the original_max_position_embeddings 1.09951e+12; the limit",
        ),
        (YARN | {"beta_fast": 1, "beta_slow": 32}, "needs beta_fast (1) of at least beta_slow (32)"),
        (YARN | {"beta_slow": 33}, "needs beta_fast (32) of at least beta_slow (33)"),
        *(
            (YARN | {key: "x"}, f"'{key}', which is 'x'")
            for key in ("beta_fast", "mscale", "mscale_all_dim", "attention_factor")
        ),
        (YARN | {"attention_factor": 1e300}, "has the attention_factor 1e+300; the limit is 2147483647"),
        *(
            (YARN | {"truncate": value}, f"truncate of rope type 'yarn' must be true or false, got {value!r}")
            for value in ("no", 0, [])
        ),
        (LLAMA3 | {"high_freq_factor": 1}, "needs high_freq_factor (1) above low_freq_factor (1)"),
        (LLAMA3 | {"low_freq_factor": None}, "'low_freq_factor', which is missing"),
        *(
            (LONGROPE | {"long_factor": [1.0, value]}, f"'long_factor[1]', which is {value!r}")
            for value in (0, -1, NAN, "2", True)
        ),
        ("yarn", "must be an object or null, got 'yarn'"),
    ],
)
def test_a_scaling_with_a_wrong_number_is_refused_by_name(folder, scaling, message):
    """Whichever key has it, and whether rustvllm's or transformers' code runs the model."""
    for config in ({"rope_scaling": scaling}, {"rope_parameters": scaling}):
        for model_impl in ("rustvllm", "transformers"):
            with pytest.raises(ModelLoadError) as raised:
                read(folder({**LLAMA, **config}), model_impl=model_impl)
            assert message in str(raised.value)
            assert "config.json" in str(raised.value)


def test_the_scaling_of_a_type_of_layer_is_checked_too(folder):
    by_type = {"full_attention": YARN | {"factor": 0}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ModelLoadError, match="'factor', which is 0"):
        read(folder({**LLAMA, "rope_parameters": by_type}))
    with pytest.raises(ModelLoadError, match="beta_fast"):
        read(folder({**LLAMA, "rope_scaling": YARN, "rope_parameters": {"beta_fast": 0.1}}))
