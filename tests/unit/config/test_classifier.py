"""What config.json and overrides say of classification: labels, activations, tokens of the head, and what is wrong."""

import re
from pathlib import Path

import pytest

from rustvllm.config.architectures import ARCHITECTURES, CLASSIFIER_CLASSES
from rustvllm.config.classifier import MAX_LABEL_BYTES, ClassifierConfig, read_classifier
from rustvllm.config.engine_args import EngineArgs
from rustvllm.config.model_folder import find_architecture
from rustvllm.config.pooler import PoolerConfig, check_pooling_flags, find_pooler
from rustvllm.exceptions import ConfigError, ModelLoadError
from rustvllm.observe.inspect.description import describe_engine
from rustvllm.process.config_json import MAX_INFO_BYTES, dump_config, dump_info, load_config

WHERE = Path("/models/m")
TOKENS = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
ACTIVATION = "torch.nn.modules.activation."


def read(**hf_config):
    return read_classifier(hf_config, WHERE)


@pytest.mark.parametrize(
    ("hf_config", "expected"),
    [
        ({}, ClassifierConfig(num_labels=2)),
        (
            {"id2label": {"0": "bad", "1": "good", "2": "fair"}},
            ClassifierConfig(num_labels=3, names=("bad", "good", "fair")),
        ),
        ({"id2label": {"0": "LABEL_0"}}, ClassifierConfig(num_labels=1, activation="sigmoid")),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 3}, ClassifierConfig(num_labels=3)),
        ({"num_labels": 1, "problem_type": "regression"}, ClassifierConfig(num_labels=1, activation="none")),
        ({"problem_type": "multi_label_classification"}, ClassifierConfig(num_labels=2, activation="sigmoid")),
        ({"problem_type": "single_label_classification"}, ClassifierConfig(num_labels=2)),
        ({"sentence_transformers": {"activation_fn": f"{ACTIVATION}Sigmoid"}}, ClassifierConfig(num_labels=2)),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            ClassifierConfig(num_labels=2, activation="none"),
        ),
        ({"use_sep_token": False}, ClassifierConfig(num_labels=2, joins_texts=True)),
        (
            TOKENS,
            ClassifierConfig(
                num_labels=1, activation="sigmoid", tokens=("no", "yes"), method="from_2_way_softmax", joins_texts=True
            ),
        ),
        (
            {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True, "use_sep_token": True},
            ClassifierConfig(num_labels=1, activation="sigmoid", tokens=("no", "yes"), method="from_2_way_softmax"),
        ),
        (
            {"classifier_from_token": ["a", "b", "c"], "method": "no_post_processing", "id2label": {"0": "x"}},
            ClassifierConfig(num_labels=3, tokens=("a", "b", "c"), method="no_post_processing", joins_texts=True),
        ),
    ],
    ids=range(13),
)
def test_what_is_read(hf_config, expected):
    assert read(**hf_config) == expected


@pytest.mark.parametrize(
    ("hf_config", "says"),
    [
        ({"classifier_from_token": ["no", "yes"]}, "classifier_from_token needs method"),
        ({"method": "from_2_way_softmax"}, "method needs classifier_from_token"),
        ({"is_original_qwen3_reranker": True}, "method needs classifier_from_token"),
        ({**TOKENS, "classifier_from_token": ["yes"]}, "must name two tokens"),
        ({**TOKENS, "classifier_from_token": "no"}, "must be a list of tokens"),
        ({**TOKENS, "classifier_from_token": []}, "must be a list of tokens"),
        ({**TOKENS, "classifier_from_token": ["no", 7]}, "must be a list of tokens"),
        ({**TOKENS, "method": "magic"}, "method must be one of from_2_way_softmax, no_post_processing, got 'magic'"),
        ({"num_labels": 0}, "num_labels must be an integer from 1 to 131072, got 0"),
        ({"num_labels": True}, "num_labels must be an integer"),
        ({"num_labels": 1 << 21}, "num_labels must be an integer"),
        ({"id2label": ["a"]}, "id2label must be an object"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must name the labels 0 to 1"),
        ({"id2label": {"0": 7}}, "each as a text"),
        ({"id2label": {"0": "x" * MAX_LABEL_BYTES}}, "the limit is 49152"),
        ({"problem_type": "ranking"}, "problem_type must be one of regression"),
        ({"sbert_ce_default_activation_function": f"{ACTIVATION}Tanh"}, "which is not supported yet"),
        ({"sbert_ce_default_activation_function": "os.system"}, "which is not supported yet"),
        ({"sentence_transformers": {"activation_fn": 7}}, "sentence_transformers.activation_fn is 7"),
        ({"use_sep_token": "no"}, "use_sep_token must be true or false"),
    ],
    ids=range(20),
)
def test_what_is_wrong_is_named(hf_config, says):
    with pytest.raises(ModelLoadError, match=re.escape(says)) as caught:
        read(**hf_config)
    assert str(caught.value).startswith(str(WHERE))


def test_labels_have_names():
    assert [read(num_labels=2).label(index) for index in range(2)] == ["LABEL_0", "LABEL_1"]
    assert read(id2label={"0": "bad", "1": "good"}).label(1) == "good"


def find(tmp_path, architecture, **given):
    options = {"runner": "auto", "convert": "auto", "pooler_config": None} | given
    return find_pooler(tmp_path, {"architectures": [architecture]}, **options)


def test_the_class_or_convert_makes_a_classifier(tmp_path):
    own, text = "Qwen3ForSequenceClassification", "Qwen3ForCausalLM"
    classifier = PoolerConfig(classifier=ClassifierConfig(num_labels=2))
    assert find(tmp_path, own) == find(tmp_path, own, runner="pooling") == classifier
    assert find(tmp_path, text, convert="classify") == find(tmp_path, own, pooler_config={"task": "classify"})
    assert (
        find(tmp_path, own, convert="embed") == find(tmp_path, own, pooler_config={"task": "embed"}) == PoolerConfig()
    )
    assert find(tmp_path, text, runner="pooling") == PoolerConfig()
    assert find(tmp_path, text) is find(tmp_path, own, runner="generate") is None
    assert find(tmp_path, own, pooler_config={"pooling_type": "MEAN"}).seq_pooling_type == "MEAN"
    with pytest.raises(ConfigError, match="has no class that ends in ForSequenceClassification: leave task out"):
        find(tmp_path, text, pooler_config={"task": "classify"})
    with pytest.raises(ConfigError, match="convert is embed, but task of pooler_config is classify"):
        check_pooling_flags("auto", "embed", {"task": "classify"})
    with pytest.raises(ConfigError, match="dimensions of pooler_config is for embeddings"):
        find(tmp_path, own, pooler_config={"dimensions": 3})


def test_each_family_has_a_class_that_classifies():
    of_text = {name for name in ARCHITECTURES if not name.endswith("ForConditionalGeneration")}
    assert set(CLASSIFIER_CLASSES.values()) == of_text
    for name, base in (
        ("Gemma3TextForSequenceClassification", "Gemma3ForCausalLM"),
        ("GPT2ForSequenceClassification", "GPT2LMHeadModel"),
    ):
        assert find_architecture({"architectures": [name]}, WHERE, "auto", "cpu", may_lack_head=True)[0] == base
    with pytest.raises(ModelLoadError, match="has the architecture Qwen3ForSequenceClassification"):
        find_architecture({"architectures": ["Qwen3ForSequenceClassification"]}, WHERE, "auto", "cpu")


def test_the_configuration_reaches_the_engines_process_and_the_start_says_it():
    names = {str(index): "label " + "x" * 40 + str(index) for index in range(900)}
    for overrides, line in (
        (TOKENS, "Classifier  1 label, sigmoid, LAST pooling"),
        ({"id2label": names}, "Classifier  900 labels, softmax, LAST pooling"),
        ({"problem_type": "regression"}, "Classifier  2 labels, LAST pooling"),
    ):
        config = EngineArgs(convert="classify", hf_overrides=overrides).create_engine_config()
        assert (config.model.runner_type, config.model.task) == ("pooling", "classify")
        assert load_config(dump_config(config)) == config
        assert len(dump_info(config)) < MAX_INFO_BYTES
        assert line in describe_engine(config, 100)
        assert config.model.pooled_size == config.model.pooler.classifier.num_labels
