"""Architectures that run by transformers' own modelling code over our paged cache, against that code with its own
attention; and what cannot run so, and says why.
"""

import json
import shutil

import pytest
import torch
from checkpoints import assert_diverse, assert_matches, prompts
from naive_schedule import NaiveEngine, Request

from rustvllm import LLM, SamplingParams
from rustvllm.config import LoadConfig
from rustvllm.config.model_folder import read_model_config
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.linear import Linear
from rustvllm.model_loader import load_model
from rustvllm.models.fallback.trace import _is_causal

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
FALLBACKS = {
    # variant -> (model_type, options), and a seed where the first does not give diverse output
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),  # does not say that it supports it
    "olmo2": ("olmo2", {}, 3),  # norms of queries and keys
    "granite": ("granite", {"logits_scaling": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "cohere2": (
        "cohere2",  # windows in some layers, a tied head with a scale behind it
        {"sliding_window": 5, "logit_scale": 2.0, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi": ("phi", {}),  # a head with a bias
    "mixtral": ("mixtral", {"num_local_experts": 4}),  # experts stored one by one
    "gemma2": (
        "gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "sliding_window": 7},
    ),
    "deepseek_v3": (
        "deepseek_v3",  # values are narrower than keys
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1, "moe_intermediate_size": 12, "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip

OF_THEIR_OWN = {"gemma2", "granite", "mixtral", "olmo2"}
"""Families that have a model here, too."""


def make(model_type, options, seed=0):
    """A tiny seeded model of transformers whose greedy output is diverse."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**(TINY | options))
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    # The model's own plain attention is the oracle.
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.normal_(std=0.1)
            elif parameter.dim() >= 2:
                parameter.normal_(std=2.0 * parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(std=0.1).add_(0.0 if name.endswith("bias") else 1.0)
    return model


def read(folder, **options):
    return read_model_config(folder, model="m", **({"model_impl": "transformers", "max_model_len": 128} | options))


def load(folder, *, load_format="auto", dtype=torch.float32, memory=1 << 30, **options):
    config = read(folder, **options)
    return load_model(config, LoadConfig(load_format=load_format), dtype, torch.device("cpu"), memory)


@pytest.fixture(scope="module", params=list(FALLBACKS))
def pair(request, tmp_path_factory):
    reference = make(*FALLBACKS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    model = load(folder, model_impl="transformers" if request.param in OF_THEIR_OWN else "auto")
    assert type(model).__name__ == "TransformersForCausalLM"
    return reference, model


def greedy(lengths, num_outputs=10, **fields):
    return [Request(prompt, num_outputs, **fields) for prompt in prompts(97, lengths)]


def check(reference, requests):
    assert_diverse([r.output for r in requests])
    clear = sum(assert_matches(reference, r) for r in requests)
    assert clear > 0.9 * sum(len(r.output) for r in requests), "margins too small to say anything"


@pytest.mark.parametrize("attention_backend", ["cpu", "torch"])
def test_chunks_mixed_with_decodes_and_preempted(pair, attention_backend):
    reference, model = pair
    requests = greedy([1, 2, 5, 9, 17, 30])
    for i, request in enumerate(requests):
        request.arrives = i  # prompts come in while others decode
    for request in requests[::2]:
        request.preempt_at = (1, 7)
    engine = NaiveEngine(model, budget=16, chunk=5, attention_backend=attention_backend, poison=True)
    engine.run(requests)
    assert sum(s.num_reqs > 1 and s.max_num_scheduled_tokens > 1 for s in engine.steps) > 3
    assert all(request.num_preemptions == 2 for request in requests[::2])
    check(reference, requests)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
def test_a_smaller_cache_is_near_one_of_float32(pair, cache_dtype):
    _, model = pair
    exact, rounded = greedy([9, 30]), greedy([9, 30])
    NaiveEngine(model).run(exact)
    NaiveEngine(model, cache_dtype=cache_dtype, poison=True).run(rounded)
    for wide, narrow in zip(exact, rounded, strict=True):
        # The first step of a request has seen the same tokens; later ones follow what was drawn.
        assert not torch.equal(narrow.logits[0], wide.logits[0]), "the cache rounded nothing"
        largest = float(wide.logits[0].abs().max())
        torch.testing.assert_close(narrow.logits[0], wide.logits[0], atol=0.06 * largest, rtol=0)


def test_greedy_ids_are_those_of_transformers_generate(pair):
    reference, model = pair
    requests = greedy([7, 12], 12)
    NaiveEngine(model).run(requests)
    for request in requests:
        generated = reference.generate(
            torch.tensor([request.prompt]), attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
            max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert generated[0, len(request.prompt) :].tolist() == request.output


@pytest.mark.parametrize("variant", ["cohere2", "phi"])  # a tied head, and one of its own
def test_through_the_engine_with_packed_layers(variant, tmp_path, monkeypatch):
    reference = make(*FALLBACKS[variant])
    reference.save_pretrained(tmp_path)
    monkeypatch.setenv("RUSTVLLM_LINEAR_KERNEL", "core")
    prompt = prompts(97, [11])[0]
    options = {"skip_tokenizer_init": True, "device": "cpu", "num_gpu_blocks_override": 16, "seed": 0}
    with LLM(str(tmp_path), **options) as llm:
        [output] = llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        model = llm.llm_engine.engine_core.core.executor._worker.runner.model
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert linears
    assert all(linear.kernel is not None for linear in linears)
    generated = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 11, dtype=torch.long), max_new_tokens=8, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert generated[0, 11:].tolist() == output.outputs[0].token_ids


def test_llama_by_transformers_is_llama_by_us(tmp_path):
    make("llama", {}).save_pretrained(tmp_path)
    engines = [NaiveEngine(load(tmp_path, model_impl=impl), chunk=6) for impl in ("rustvllm", "transformers")]
    assert [type(e.runner.model).__name__ for e in engines] == ["LlamaForCausalLM", "TransformersForCausalLM"]
    ours, theirs = (engine.run(greedy([1, 4, 20])) for engine in engines)
    for a, b in zip(ours, theirs, strict=True):
        assert a.output == b.output
        torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype, tmp_path):
    reference = make("olmo2", {})
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, dtype=dtype, model_impl="transformers")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    requests = greedy([3, 9], 4)
    NaiveEngine(model).run(requests)
    for request in requests:
        # transformers' own rounding in the same dtype is of this size too
        assert_matches(reference.to(dtype), request, atol=0.25 if dtype == torch.bfloat16 else 0.05, margin=1.0)


def test_dummy_weights_need_no_checkpoint_and_depend_on_the_seed(tmp_path):
    make("stablelm", {}).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["StableLmForCausalLM"]}))
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (3, 3, 4))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))
    requests = greedy([5, 9])
    NaiveEngine(first).run(requests)
    assert all(len(set(request.output)) > 4 for request in requests)


def test_a_tied_head_that_was_stored_with_other_values_is_kept(tmp_path):
    from safetensors.torch import load_file, save_file

    reference = make("cohere2", FALLBACKS["cohere2"][1])
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    hidden = torch.randn(3, 32)
    save_file(tensors | {"lm_head.weight": embedding + 1}, file)
    expected = 2.0 * hidden @ (embedding + 1).T
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path).compute_logits(hidden), expected, atol=1e-4, rtol=0)
    # Stored under the head's name only.
    del tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding}, file)
    with torch.inference_mode():
        logits = load(tmp_path).compute_logits(hidden)
    torch.testing.assert_close(logits, 2.0 * hidden @ embedding.T, atol=1e-4, rtol=0)


def refused(folder, config, **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError) as caught:
        load(folder, load_format="dummy", **options)
    return str(caught.value)


def config_of(model_type, architecture, **options):
    return TINY | {"model_type": model_type, "architectures": [architecture]} | options


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (config_of("bloom", "BloomForCausalLM"), "it adds ALiBi biases inside its own attention"),
        (config_of("mamba", "MambaForCausalLM"), "it keeps a recurrent state"),
        (config_of("gptj", "GPTJForCausalLM"), "does not go through transformers' attention interface"),
        (config_of("bart", "BartForCausalLM", is_encoder_decoder=True), "an encoder-decoder model"),
        (config_of("bert", "BertLMHeadModel"), "its mask is neither causal nor a causal sliding window"),
        (config_of("qwen3_next", "Qwen3NextForCausalLM"), "it keeps a recurrent state"),
        (config_of("lfm2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"]), "(Conv1d) mixes tokens"),
        (config_of("gpt_oss", "GptOssForCausalLM", num_local_experts=2), "asks attention for s_aux"),
        (config_of("diffllama", "DiffLlamaForCausalLM"), "attends more than once per token"),
        (config_of("llama4_text", "Llama4ForCausalLM", head_dim=8, num_local_experts=2), "cannot be separated from"),
        (config_of("frog", "FrogForCausalLM"), "neither in rustvllm nor in transformers"),
        (config_of("frog", "FrogForImages"), "has the architecture FrogForImages; supported are"),
        (config_of("stablelm", "StableLmForCausalLM", hidden_act="croak"), "cannot build it from this config.json"),
        (config_of("stablelm", "StableLmForCausalLM", quantization_config={"bits": 4}), "names no quant_method"),
        (config_of("stablelm", "StableLmForCausalLM", hidden_size=float("nan")), "hidden_size must be a positive"),
    ],
)  # fmt: skip
def test_what_cannot_run_says_why(tmp_path, config, why):
    message = refused(tmp_path, config)
    assert why in message
    assert config["architectures"][0] in message or "config.json" in message


def test_frequencies_that_follow_the_batch_are_pinned_and_limited(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    reference = make("arcee", {"rope_parameters": rope})
    reference.save_pretrained(tmp_path)
    assert read(tmp_path, max_model_len=None).max_model_len == 512
    with pytest.raises(ModelLoadError, match="max_model_len is 129, but this ArceeForCausalLM has 128 positions"):
        load(tmp_path, max_model_len=129)
    requests = greedy([3, 100], 12)
    NaiveEngine(load(tmp_path), chunk=50).run(requests)
    assert sum(assert_matches(reference, request) for request in requests) > 20


CODE = """
import torch
from torch import nn
from transformers import PreTrainedModel, PretrainedConfig, GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

open({marker!r}, "w").close()

class FrogConfig(PretrainedConfig):
    model_type = "frog"

class Frog(PreTrainedModel):
    config_class = FrogConfig
    base_model_prefix = "model"

class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, x, mask):
        heads = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, *heads, mask, scaling=0.3)[0].flatten(2)

class FrogModel(Frog):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Attention(config, i) for i in range({num_layers}))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        x = self.embed(input_ids)
        mask = create_causal_mask(self.config, x, attention_mask, None, position_ids)
        x = x + self.places({positions})
        for layer in self.layers:
            x = x + layer(x, mask)
        return BaseModelOutputWithPast(last_hidden_state=x)

class FrogForCausalLM(Frog, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = FrogModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, **kwargs).last_hidden_state))
"""


@pytest.fixture
def frog(tmp_path, monkeypatch):
    """The folder of a model that brings its own code, and the file that appears when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "model", tmp_path / "it_ran"

    def write(positions="position_ids", num_layers="config.num_hidden_layers"):
        folder.mkdir(exist_ok=True)
        code = CODE.replace("{marker!r}", repr(str(marker))).replace("{positions}", positions)
        code = code.replace("{num_layers}", num_layers)
        (folder / "modeling_frog.py").write_text(code)
        auto_map = {"AutoConfig": "modeling_frog.FrogConfig", "AutoModelForCausalLM": "modeling_frog.FrogForCausalLM"}
        (folder / "config.json").write_text(json.dumps(config_of("frog", "FrogForCausalLM", auto_map=auto_map)))
        return folder, marker

    return write


def test_code_of_the_model_runs_only_when_it_is_trusted(frog):
    folder, marker = frog()
    with pytest.raises(ModelLoadError) as caught:
        load(folder, load_format="dummy")
    assert "modeling_frog.FrogForCausalLM), which only runs with --trust-remote-code" in str(caught.value)
    assert not marker.exists()
    model = load(folder, load_format="dummy", trust_remote_code=True)
    assert marker.exists()
    whole, cut = greedy([9, 14]), greedy([9, 14])
    NaiveEngine(model).run(whole)
    NaiveEngine(model, chunk=4).run(cut)
    assert [request.output for request in whole] == [request.output for request in cut]


def test_code_that_counts_positions_itself_is_found_out(frog):
    folder, _ = frog(positions="torch.arange(input_ids.shape[1])[None]")
    with pytest.raises(ModelLoadError, match="depends on its neighbours or on its prompt's chunks"):
        load(folder, load_format="dummy", trust_remote_code=True)


def test_layers_that_do_not_attend_are_found_out(frog):
    folder, _ = frog(num_layers="1")
    with pytest.raises(ModelLoadError, match="1 of its 2 layers use transformers' attention interface"):
        load(folder, load_format="dummy", trust_remote_code=True)


def test_which_masks_count_as_causal():
    from transformers import masking_utils as masks

    left_padding = torch.zeros(1, dtype=torch.int64)
    assert _is_causal(masks.causal_mask_function, None)
    for window in (1, 2, 16, 4096):
        assert _is_causal(masks.sliding_window_causal_mask_function(window), window)
        assert not _is_causal(masks.sliding_window_causal_mask_function(window), window + 1)
        assert not _is_causal(masks.sliding_window_causal_mask_function(window), None)
        assert not _is_causal(masks.causal_mask_function, window)
        assert window == 1 or not _is_causal(masks.chunked_causal_mask_function(window, left_padding), window)
        assert not _is_causal(masks.sliding_window_bidirectional_mask_function(window), window)
    assert not _is_causal(masks.bidirectional_mask_function, None)


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("raise ValueError('croak')", "cannot be loaded: ValueError: croak"),
        ("FrogForCausalLM = FrogConfig = int", "is not a PreTrainedModel"),
        (None, "cannot be loaded"),
    ],
)
def test_broken_code_of_the_model(frog, code, part):
    folder, _ = frog()
    file = folder / "modeling_frog.py"
    if code is None:
        file.unlink()
    else:
        file.write_text(code)
    with pytest.raises(ModelLoadError) as caught:
        load(folder, load_format="dummy", trust_remote_code=True)
    assert part in str(caught.value)
    shutil.rmtree(folder)
