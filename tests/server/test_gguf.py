"""A GGUF file behind a server: its own tokenizer and template, and the tokens of the model that it was made of."""

import copy
import json
from pathlib import Path

import httpx
import pytest
from server_process import REAL, ServerProcess

gguf_files = pytest.importorskip("gguf_files", reason="the gguf package is not installed", exc_type=ImportError)

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}Once"


@pytest.fixture(scope="module")
def model(shared_dir, tmp_path_factory):
    """The file, and the transformers model with the file's numbers."""
    import transformers

    folder = shared_dir / "data/stories260K/hf"
    reference = copy.deepcopy(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")).eval()
    path = tmp_path_factory.mktemp("gguf") / "stories-Q8_0.gguf"

    def kind_of(name):  # its MLP has 172 features, which are not whole blocks
        return "F32" if "ffn_down" in name else "Q8_0"

    def metadata(writer):
        gguf_files.write_tokenizer(writer, folder, None, template=TEMPLATE)
        writer.add_float32("general.sampling.temp", 0.0)

    gguf_files.write_model(path, reference, kind_of, metadata=metadata)
    return path, reference


def test_a_chat_is_answered_with_the_files_template(model):
    import torch

    path, reference = model
    with ServerProcess([*REAL, str(path)]) as server, httpx.Client() as client:
        server.wait_until_ready()
        answer = client.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "A story."}], "max_tokens": 24},
            timeout=60,
        ).json()
        rendered = client.post(
            f"{server.url}/tokenize", json={"messages": [{"role": "user", "content": "A story."}]}, timeout=60
        ).json()
        models = client.get(f"{server.url}/v1/models", timeout=60).json()
        chosen = client.post(
            f"{server.url}/v1/completions",
            json={"prompt": "Once", "max_tokens": 9, "structured_outputs": {"choice": ["a mountain", "a river"]}},
            timeout=60,
        ).json()
    assert "error" not in answer, answer
    assert chosen["choices"][0]["text"] in ("a mountain", "a river"), chosen
    prompt = rendered["tokens"]
    assert models["data"][0]["id"] == str(path)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    from rustvllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(path)
    assert prompt == tokenizer.encode("A story. Once", add_special_tokens=False)
    text = answer["choices"][0]["message"]["content"]
    assert len(text) > 20
    assert tokenizer.decode(expected.tolist()).strip() == text.strip()


def test_inspect_says_what_it_is(model, capsys):
    from rustvllm.cli.main import main

    path, reference = model
    assert main(["inspect", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["parameters"] == sum(p.numel() for p in reference.parameters())
    assert facts["chat_template"]
    assert not facts["tools"]
    assert facts["runs"]
    assert set(facts["forms"]) == {"Q8_0", "F32"}
    assert facts["bytes"] < Path(path).stat().st_size
    assert main(["inspect", str(path)]) == 0
    assert "Q8_0" in capsys.readouterr().out
    assert main(["inspect", "/no/such.gguf"]) == 1
    assert "there is no folder and no GGUF file /no/such.gguf" in capsys.readouterr().out


def test_transformers_tokenizer_of_the_file_has_the_engines_ids(model):
    from rustvllm import EngineArgs
    from rustvllm.text.tokenizer import Tokenizer
    from rustvllm.text.transformers_tokenizer import load_transformers_tokenizer

    path, _ = model
    ours = Tokenizer.from_folder(path)
    theirs = load_transformers_tokenizer(EngineArgs(model=str(path)).create_engine_config().model)
    for text in ("Once upon a time", "  héllo\n🦀", ""):
        assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode(theirs.encode("a river"), skip_special_tokens=True) == "a river"
    assert theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x Once"
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
