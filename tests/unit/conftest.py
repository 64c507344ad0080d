"""An engine with the real core and a toy model: after token t comes token t + 1, so "ab" goes on with "cdef…".

The tokenizer has one token per byte (id = byte value) and ``<eos>`` = 256.
"""

import json
import threading
import time

import numpy as np
import pytest

from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine import start as engine_start
from rustvllm.worker.step_output import ModelRunnerOutput

EOS, VOCAB = 256, 257
EXTRA_EOS = ord("~")
_DTYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}


class ToyExecutor:
    """The interface of ``UniProcExecutor`` without torch.

    Attributes:
        steps: Tokens of every step that was executed.
        fail_steps: So many of the next steps raise.
        gate: A step waits until it is set.
        step_seconds: How long a step takes.
    """

    def __init__(self, config):
        self.config = config
        self.steps = []
        self.fail_steps = 0
        self.error = RuntimeError("boom")
        self.gate = threading.Event()
        self.gate.set()
        self.step_seconds = 0.0
        self.forward_ns = 0
        self.tower_ns = 0
        self.was_shut_down = False
        self.on_step = None

    def load_model(self):
        pass

    def determine_num_blocks(self):
        return self.config.cache.num_gpu_blocks_override or 65

    def determine_num_cpu_blocks(self, num_blocks):
        return 8 if self.config.scheduler.preemption_mode == "swap" else 0

    def initialize_kv_cache(self, num_blocks, buffer_spec, num_sets, num_cpu_blocks=0):
        self.sets = [
            {name: np.zeros(shape, _DTYPES[dtype]) for name, dtype, shape in buffer_spec} for _ in range(num_sets)
        ]
        return self.sets

    def bind_token_ids(self, token_ids, sampling_extras=None, multimodal=None):
        self.token_ids = token_ids

    def warm_up(self):
        pass

    def execute_model(self, output):
        self.steps.append(output.total_num_scheduled_tokens)
        self.gate.wait(30)
        time.sleep(self.step_seconds)
        if self.on_step is not None:
            self.on_step(len(self.steps))
        if self.fail_steps:
            self.fail_steps -= 1
            raise self.error
        arrays = self.sets[output.buffer_index]
        last = arrays["input_ids"][arrays["logits_indices"][: output.num_sampled]]
        self.sampled = ((last + 1) % VOCAB).astype(np.int32)[:, None]

    def forward_ns_left(self):
        return 0

    def sample_tokens(self, grammar_output=None):
        return ModelRunnerOutput(np.ascontiguousarray(self.sampled))

    def discard_step(self):
        self.sampled = None

    def watch(self, on_death):
        pass

    def check(self):
        pass

    def rank_states(self):
        return []

    def shutdown(self):
        self.was_shut_down = True


def bytes_to_unicode():
    """The byte alphabet of byte-level BPE: printable bytes stand for themselves, others for what comes after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("toy-model")
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB, "n_embd": 4, "n_layer": 1, "n_head": 1}
    config |= {"n_positions": 64, "eos_token_id": [EOS, EXTRA_EOS]}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return str(folder)


@pytest.fixture
def toy_executors(monkeypatch):
    """Every toy executor made during the test, in order."""
    made = []

    def make(config, _node_secret=None):
        made.append(ToyExecutor(config))
        return made[-1]

    monkeypatch.setattr(engine_start, "make_executor", make)
    return made


@pytest.fixture
def toy_config(toy_model):
    """Makes the configuration of a toy engine."""

    def make(usage="llm_class", **changes):
        args = {"model": toy_model, "load_format": "dummy", "device": "cpu", "max_num_seqs": 8, "block_size": 4}
        return EngineArgs(**(args | changes)).create_engine_config(usage)

    return make
