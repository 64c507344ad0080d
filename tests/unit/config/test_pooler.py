"""Which models make embeddings, and how: flags, classes, the files of sentence-transformers, and what is wrong."""

import json
import re

import pytest

from rustvllm.config.architectures import ARCHITECTURES, BARE_CLASSES
from rustvllm.config.engine_args import EngineArgs
from rustvllm.config.pooler import MAX_FILE_BYTES, PoolerConfig, check_pooling_flags, find_pooler, longest_text
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.observe.inspect.description import describe_engine
from rustvllm.process.config_json import dump_config, load_config

QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
BARE = {"architectures": ["Qwen3Model"]}
OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules.pooling."


def find(path, hf_config=QWEN3, *, runner="auto", convert="auto", pooler_config=None):
    return find_pooler(path, hf_config, runner=runner, convert=convert, pooler_config=pooler_config)


def write(folder, kinds, pooling, place="1_Pooling"):
    modules = [
        {"idx": index, "path": place if kind.endswith("Pooling") else f"{index}", "type": kind}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / place).mkdir(parents=True, exist_ok=True)
    (folder / place / "config.json").write_text(json.dumps(pooling))


KINDS = [f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Normalize"]
LAST = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}


def test_auto_follows_the_class_and_the_folder(tmp_path):
    assert find(tmp_path) is None
    for kind in ("GPT2LMHeadModel", "GPT2ChatModel"):
        assert find(tmp_path, {"architectures": [kind]}) is None
    for config in (BARE, {"architectures": ["MistralEmbeddingModel"]}, {"architectures": ["XForTextEncoding"]}):
        assert find(tmp_path, config) == PoolerConfig()
    assert (
        find(tmp_path, {}) is find(tmp_path, {"architectures": None}) is find(tmp_path, {"architectures": [7]}) is None
    )
    assert find(tmp_path, convert="embed") == find(tmp_path, runner="pooling") == PoolerConfig()
    write(tmp_path, KINDS, LAST)
    assert find(tmp_path) == PoolerConfig()
    assert find(tmp_path, runner="generate") is None
    write(tmp_path, KINDS[:2], LAST)
    assert find(tmp_path) == PoolerConfig(use_activation=False)
    assert find(tmp_path, pooler_config={"use_activation": True}) == PoolerConfig()


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True}, "MEAN"),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, "CLS"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "LAST"),
        ({"pooling_mode": "lasttoken"}, "LAST"),
        ({"pooling_mode": ["mean"]}, "MEAN"),
        ({"pooling_mode": "mean", "pooling_mode_mean_tokens": True}, "MEAN"),
        ({"pooling_mode": "mean", "pooling_mode_lasttoken": True}, None),
        ({"pooling_mode": [["mean"]]}, None),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, None),
        ({"pooling_mode_weightedmean_tokens": True}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": "max"}, None),
        ({}, None),
    ],
)
def test_the_pooling_of_a_folder(tmp_path, pooling, expected):
    write(tmp_path, [KINDS[0], f"{NEW}Pooling"], pooling)
    if expected is not None:
        assert find(tmp_path).seq_pooling_type == expected
        return
    with pytest.raises(ModelLoadError, match="pools by lasttoken, mean or cls"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ("{", "not valid JSON"),
        ("{}", "must hold a JSON list"),
        ('[{"type": "x.Pooling"}]', "the path '' of Pooling is not in that folder"),
        ('[{"type": "x.Pooling", "path": "../other"}]', "is not in that folder"),
        ('[{"type": "x.Pooling", "path": "/etc"}]', "is not in that folder"),
        ('[{"type": "x.Pooling", "path": "nowhere"}]', "there is no"),
        ('[{"type": "x.Pooling", "path": "p"}, {"type": "x.Dense", "path": "d"}]', "a module 'Dense'"),
        ('[{"type": "x.Pooling", "path": "p"}, 7]', "a module ''"),
        ('[{"type": "x.Pooling", "path": "p"}, {"type": "x.Pooling", "path": "p"}]', "Pooling, Pooling, which is not"),
        ('[{"type": "x.Normalize"}, {"type": "x.Pooling", "path": "p"}]', "Normalize, if there is one, last"),
        ('[{"type": "x.Pooling", "path": "p"}, {"type": "x.Transformer"}]', "must come after Transformer"),
        (json.dumps([{"type": "x.Pooling", "path": "p" * 5000}]), "File name too long"),
        ("[" * 100_000, "not valid JSON"),
        (" " * (MAX_FILE_BYTES + 1), f"the limit is {MAX_FILE_BYTES}"),
    ],
    ids=range(14),
)
def test_files_that_are_wrong_are_named(tmp_path, modules, says):
    (tmp_path / "modules.json").write_text(modules)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text(json.dumps(LAST))
    with pytest.raises(ModelLoadError, match=re.escape(says)) as caught:
        find(tmp_path)
    assert "modules.json" in str(caught.value) or "p" * 50 in str(caught.value)
    assert find(tmp_path, runner="generate") is None


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        (None, 512),
        ({}, 512),
        ({"max_seq_length": None, "do_lower_case": False}, 512),
        ({"max_seq_length": 64}, 64),
        ({"max_seq_length": 4096}, 512),
        ({"max_seq_length": 0}, "max_seq_length must be a positive integer, got 0"),
        ({"max_seq_length": True}, "must be a positive integer"),
        ({"max_seq_length": "64"}, "must be a positive integer"),
        ({"do_lower_case": True}, "do_lower_case is true"),
        ([], "must hold a JSON object"),
    ],
    ids=range(10),
)
def test_a_folder_may_say_how_long_a_text_is(tmp_path, about, expected):
    if about is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(about))
    if isinstance(expected, int):
        assert longest_text(tmp_path, 512) == expected
        return
    with pytest.raises(ModelLoadError, match=expected):
        longest_text(tmp_path, 512)


def test_a_folder_whose_modules_do_not_pool_generates(tmp_path):
    for modules in ([], [{"type": f"{OLD}Transformer"}]):
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        assert find(tmp_path) is None


@pytest.mark.parametrize("both_ways", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_models_that_look_ahead_are_refused(tmp_path, both_ways):
    with pytest.raises(ModelLoadError, match="only serves causal attention"):
        find(tmp_path, BARE | both_ways)
    assert find(tmp_path, QWEN3 | both_ways) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, PoolerConfig()),
        ({}, PoolerConfig()),
        (
            {"pooling_type": "MEAN", "use_activation": False},
            PoolerConfig(seq_pooling_type="MEAN", use_activation=False),
        ),
        ({"seq_pooling_type": "CLS", "task": "embed", "dimensions": None}, PoolerConfig(seq_pooling_type="CLS")),
        ({"enable_chunked_processing": False, "dimensions": 4}, PoolerConfig(dimensions=4)),
        ({"pooling_type": "MAX"}, "pooling_type of pooler_config must be one of LAST, MEAN, CLS"),
        ({"pooling_type": "ALL"}, "must be one of LAST, MEAN, CLS"),
        ({"pooling_type": "LAST", "seq_pooling_type": "LAST"}, "mean the same"),
        ({"tok_pooling_type": "ALL"}, "not one per token"),
        ({"normalize": True}, "called use_activation now"),
        ({"task": "score"}, "task of pooler_config must be one of embed, classify, got 'score'"),
        ({"use_activation": 1}, "use_activation must be true or false"),
        ({"dimensions": 0}, "dimensions must be at least 1"),
        ({"dimensions": True}, "dimensions must be an integer"),
        ({"enable_chunked_processing": True}, "must fit into max_model_len"),
        ({"max_embed_len": 9}, "must fit into max_model_len"),
        ({"poolingtype": "LAST"}, "has no key 'poolingtype': the keys are pooling_type, seq_pooling_type"),
        ("LAST", "must be an object"),
    ],
    ids=range(18),
)
def test_pooler_config(tmp_path, given, expected):
    if isinstance(expected, PoolerConfig):
        assert find(tmp_path, runner="pooling", pooler_config=given) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        check_pooling_flags("pooling", "auto", given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"runner": "draft"}, "runner must be one of auto, generate, pooling, got 'draft'"),
        ({"runner": 7}, "runner must be one of"),
        ({"convert": "reward"}, "convert must be one of auto, none, embed, classify, got 'reward'"),
        ({"runner": "generate", "convert": "embed"}, "contradict each other"),
        ({"runner": "generate", "pooler_config": {}}, "pooler_config is for embeddings"),
        ({"pooler_config": {"pooling_type": "X"}}, "must be one of LAST"),
    ],
    ids=range(6),
)
def test_flags_that_are_wrong(options, says):
    with pytest.raises(ConfigError, match=says):
        EngineArgs(**options).create_engine_config()


def test_the_configuration_reaches_the_engines_process_and_a_mean_needs_no_cache():
    for kind in ("LAST", "MEAN"):
        args = EngineArgs(runner="pooling", pooler_config={"pooling_type": kind})
        config = args.create_engine_config()
        assert config.model.pooler == PoolerConfig(seq_pooling_type=kind)
        assert config.model.runner_type == "pooling"
        assert config.cache.enable_prefix_caching is (kind == "LAST")
        assert load_config(dump_config(config)) == config
    assert EngineArgs().create_engine_config().model.runner_type == "generate"


def test_the_start_says_what_vectors_there_are():
    overrides = {"is_matryoshka": True}
    args = EngineArgs(runner="pooling", hf_overrides=overrides, pooler_config={"dimensions": 8, "pooling_type": "CLS"})
    lines = describe_engine(args.create_engine_config(), 100)
    assert "Embeddings  8 numbers each, of length 1, CLS pooling" in lines
    assert not any("Embeddings" in line for line in describe_engine(EngineArgs().create_engine_config(), 100))


def test_each_family_has_a_class_without_a_head():
    of_text = {name for name in ARCHITECTURES if not name.endswith("ForConditionalGeneration")}
    assert set(BARE_CLASSES.values()) == of_text
    assert BARE_CLASSES["Qwen3Model"] == "Qwen3ForCausalLM"
    assert BARE_CLASSES["GPT2Model"] == "GPT2LMHeadModel"
