"""Pairs of texts against the tokenizers of Hugging Face's packages: special tokens, and what is cut."""

import json

import pytest
from tokenizers import Tokenizer as Oracle
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer  # noqa: TID251 -- the oracle

from rustvllm.exceptions import ModelLoadError
from rustvllm.text.pair_template import PairTemplate, read_pair_template
from rustvllm.text.tokenizer import Tokenizer

SPECIAL = {"<s>": 30, "</s>": 31}
WORDS = {**{f"w{index}": index for index in range(30)}, **SPECIAL}
LIST = list(SPECIAL.items())
PROCESSORS = {
    "none": None,
    "bytes": processors.ByteLevel(trim_offsets=False),
    "around": processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", LIST),
    "twice": processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", LIST),
    "after bytes": processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", LIST)]
    ),
    "bert": processors.BertProcessing(("</s>", 31), ("<s>", 30)),
    "roberta": processors.RobertaProcessing(("</s>", 31), ("<s>", 30)),
}
LENGTHS = [(1, 1), (1, 9), (9, 1), (4, 5), (12, 12), (20, 3), (3, 20), (0, 5)]


def write(folder, processor, config=None):
    tokenizer = Oracle(models.WordLevel(WORDS, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    if processor is not None:
        tokenizer.post_processor = processor
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def words(count, first):
    return " ".join(f"w{(first + index) % 30}" for index in range(count))


@pytest.mark.parametrize("name", PROCESSORS)
def test_pairs_are_those_of_transformers(name, tmp_path):
    write(tmp_path, PROCESSORS[name])
    own, oracle = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    template = read_pair_template(tmp_path, own)
    for num_first, num_second in LENGTHS:
        first, second = words(num_first, 3), words(num_second, 11)
        ids = own.encode(first, False), own.encode(second, False)
        assert template.join(*ids) == oracle(first, second)["input_ids"]
        for keep in (5, 6, 9, 10, 14, 100):
            wanted = oracle(first, second, truncation="longest_first", max_length=keep)["input_ids"]
            assert template.join(*ids, keep=keep) == wanted, (num_first, num_second, keep)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_affixes_of_the_configuration_go_around_both(bos, eos, tmp_path):
    config = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": bos, "add_eos_token": eos}
    write(tmp_path, PROCESSORS["around"], config)
    own = Tokenizer.from_folder(tmp_path)
    before, behind = [30] * bos, [31] * eos
    assert read_pair_template(tmp_path, own).join([1], [2]) == [*before, 1, *behind, *before, 2, *behind]


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        ({"type": "Magic"}, "its post-processor is 'Magic'"),
        ({"type": "Sequence", "processors": [{"type": "BertProcessing"}] * 2}, "several post-processors"),
        (
            {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "B"}}], "special_tokens": {}},
            "has the texts B, not A and B",
        ),
        ({"type": "TemplateProcessing", "pair": [{"SpecialToken": {"id": "x"}}], "special_tokens": {}}, "'x'"),
        ([1], "does not say how"),
    ],
    ids=range(5),
)
def test_a_post_processor_that_is_not_known_is_named(processor, says, tmp_path):
    write(tmp_path, None)
    own = Tokenizer.from_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": processor}))
    with pytest.raises(ModelLoadError, match=says) as caught:
        read_pair_template(tmp_path, own)
    assert str(tmp_path) in str(caught.value)


def test_no_room_leaves_the_special_tokens():
    assert PairTemplate((1,), (2,), (3,)).join([7, 8], [9], keep=2) == [1, 2, 3]
