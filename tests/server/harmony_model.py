"""The embedded model as one of gpt-oss: its special tokens, and three that nothing needs, are the marks of messages."""

import json
import shutil
from pathlib import Path

import rustvllm

MARKS = {
    "<|channel|>": 1,
    "<|message|>": 2,
    "<|start|>": 3,
    "<|end|>": 4,
    "<|return|>": 2045,
    "<|call|>": 2046,
    "<|constrain|>": 2047,
}
TEMPLATE = (
    "{% if tools %}# Tools {{ tools | tojson }}{% endif %}{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_WERE = {"<|system|>": "<|channel|>", "<|user|>": "<|message|>", "<|assistant|>": "<|start|>"}


def harmony_model(folder: Path) -> str:
    """Puts it into ``folder``; gives its path."""
    for file in (Path(rustvllm.__file__).parent / "assets" / "tiny").iterdir():
        shutil.copyfile(file, folder / file.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for was, mark in _WERE.items():
            text = text.replace(was, mark)
        (folder / name).write_text(text)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    freed = [tokenizer["model"]["vocab"].pop("".join(pair)) for pair in tokenizer["model"]["merges"][-3:]]
    assert sorted(freed) == [2045, 2046, 2047], "the rarest tokens are the last"
    del tokenizer["model"]["merges"][-3:]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for mark in ("<|return|>", "<|call|>", "<|constrain|>"):
        tokenizer["added_tokens"].append({"id": MARKS[mark], "content": mark, **plain, "special": True})
        tokenizer["model"]["vocab"][mark] = MARKS[mark]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": TEMPLATE, "additional_special_tokens": list(MARKS), "model_max_length": 512}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **settings}))
    generation = json.loads((folder / "generation_config.json").read_text())
    ends = {"eos_token_id": [0, MARKS["<|return|>"], MARKS["<|call|>"]]}
    (folder / "generation_config.json").write_text(json.dumps({**generation, **ends}))
    return str(folder)
