"""Adapters with random matrices, as peft saves them, and peft's own logits to compare with."""

import copy
import warnings
from contextlib import contextmanager

import torch

ALL_LINEAR = {"target_modules": "all-linear"}
QUERY_VALUE = {
    "gpt2": ["c_attn"], "opt": ["q_proj", "v_proj"], "gpt-neox": ["query_key_value"], "phi3": ["qkv_proj"],
}  # fmt: skip
EXPRESSION = r".*\.(h|layers)\.[01]\..*(c_attn|c_fc|[qkv]_proj|down_proj|fc1|dense|query_key_value|qkv_proj)"
KINDS = ("query and value", "all linear", "rslora", "patterns", "expression", "DoRA")


@contextmanager
def quiet():
    """peft uses names of transformers that will go away, and says of Conv1D that it turns its matrices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)
        yield


def options_of(kind, architecture):
    """Arguments of ``LoraConfig`` for one of ``KINDS``."""
    if kind == "query and value":
        return {"target_modules": QUERY_VALUE.get(architecture, ["q_proj", "v_proj"])}
    if kind == "rslora":
        return ALL_LINEAR | {"use_rslora": True, "r": 8, "lora_alpha": 3}
    if kind == "patterns":
        layers = "h" if architecture == "gpt2" else "layers"
        ranks = {rf"{layers}.0\..*": 2, rf"{layers}.1\..*": 6}  # no two name one module: peft sorts them when it saves
        return ALL_LINEAR | {"rank_pattern": ranks, "alpha_pattern": {r".*\.[12]\..*": 3}}
    if kind == "expression":
        return {"target_modules": EXPRESSION}
    if kind == "DoRA":
        return ALL_LINEAR | {"use_dora": True, "rank_pattern": {r".*\.1\..*": 2}}
    return ALL_LINEAR


def make_adapter(model, folder, *, seed, size=1.0, **options):
    """Save an adapter of ``model``, whose modules are as before afterwards.

    Both matrices are random: peft begins with a B of zeros, which changes nothing.

    Args:
        model: transformers'.
        folder: For the two files.
        seed: Of the numbers.
        size: Factor on what it adds.
        options: For ``LoraConfig``.
    """
    import peft

    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options))
    with quiet():
        adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            # What is added has about the size of what the layer itself gives.
            scale = parameter.shape[1] ** -0.5 * (size if "lora_B" in name else 1.0)
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        elif "lora_magnitude_vector" in name:  # peft begins with the lengths of the weight's own rows
            parameter.data *= torch.rand(parameter.shape, generator=generator) + 0.5
    adapted.save_pretrained(folder)
    _unload(adapted, model)


def _unload(adapted, model):
    adapted.unload()
    if hasattr(model, "peft_config"):
        del model.peft_config


@contextmanager
def with_adapter(model, folder):
    """``model`` with an adapter, by peft; afterwards as before."""
    import peft

    with quiet():
        adapted = peft.PeftModel.from_pretrained(model, folder).eval()
    try:
        yield adapted
    finally:
        _unload(adapted, model)


def merged(model, folders):
    """A copy of ``model`` with adapters merged into its weights, by peft."""
    import peft

    model = copy.deepcopy(model)
    for folder in folders:
        with quiet():
            model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
        if hasattr(model, "peft_config"):
            del model.peft_config
    return model.eval()


@torch.no_grad()
def logits(model, tokens):
    """``[len(tokens), vocab_size]``, float32."""
    return model(torch.tensor([tokens])).logits[0].float()
