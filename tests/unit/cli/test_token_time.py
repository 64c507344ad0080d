"""What ``inspect`` times: products of every form that a checkpoint's layers can be kept in."""

import subprocess
import sys

import pytest

from rustvllm.cli import token_time
from rustvllm.config.checkpoint.forms import KeptLayer
from rustvllm.config.checkpoint.whole_forms import NumberForm

FORMS = [
    None,
    NumberForm(32),
    NumberForm(16),
    NumberForm(1 << 24),
    NumberForm(32, 4, "f16"),
    NumberForm(32, 4, "f16", "minimum"),
    NumberForm(128, 4, "bf16", "point"),
    NumberForm(32, 8, "f32", "minimum"),
    NumberForm(32, 4, "two-level", "minimum"),
    NumberForm(32, 8, "two-level", "minimum"),
    NumberForm(16, 8, "two-level", "minimum"),
    NumberForm(16, 6, "two-level"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(token_time, "MEASURE_SECONDS", 0.01)


@pytest.mark.parametrize("item_bytes", [4, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activations", ["int8", "float"])
def test_every_form_has_a_time(form, item_bytes, activations, monkeypatch):
    monkeypatch.setenv("RUSTVLLM_ACTIVATIONS", activations)
    rest = token_time.STEP_SECONDS + 2 * token_time.LAYER_SECONDS
    layers = [KeptLayer(512 * 256, form, item_bytes, is_read=True)] * 4
    found = token_time.best_token_seconds(layers, 256, 2)
    assert rest < found < 1


def test_what_is_looked_up_and_what_is_small_takes_none():
    rest = token_time.STEP_SECONDS + 2 * token_time.LAYER_SECONDS
    layers = [KeptLayer(1 << 30, NumberForm(32), 4, is_read=False), KeptLayer(256, None, 4, is_read=True)]
    assert token_time.best_token_seconds(layers, 256, 2) == rest


def test_torch_is_not_needed():
    program = "import sys; import rustvllm.cli.token_time; import rustvllm.cli.inspect; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
