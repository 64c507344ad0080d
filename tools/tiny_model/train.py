"""Training: pack documents into rows, optimise, and write the folder that ships."""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tiny_model.corpus import SPECIAL_TOKENS, documents
from tiny_model.tokenizer import stop_token_ids, tokenizer_config, train_tokenizer

Model = TypeVar("Model", bound=PreTrainedModel)

IGNORED = -100  # label of a position that is padding


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from the corpus itself."""

    seed: int = 20260
    steps: int = 8000
    tokens_per_step: int = 2048
    row_lengths: tuple[int, ...] = (256, 256, 256, 512)  # used in turn, so that every position is trained
    learning_rate: float = 3e-3
    warmup_steps: int = 150
    decay_share: float = 0.3  # the last part of the steps, in which the rate falls linearly to zero
    weight_decay: float = 0.1
    muon_momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)
    gradient_clip: float = 1.0
    n_layer: int = 6
    n_embd: int = 192
    n_head: int = 3
    n_positions: int = 512
    tokenizer_documents: int = 12_000
    threads: int = 2


@dataclass(frozen=True)
class Batch:
    """Rows of whole documents. A document sees itself only, as a request does when the model is served."""

    input_ids: torch.Tensor  # int64 [rows, length]
    labels: torch.Tensor  # int64 [rows, length]: the next token of the same document, or IGNORED
    position_ids: torch.Tensor  # int64 [rows, length]
    attention_mask: torch.Tensor  # float32 [rows, 1, length, length], added to the scores


class Packer:
    """Turns the stream of documents into rows of fixed length."""

    def __init__(self, seed: int, tokenizer: Tokenizer, pool: int = 256) -> None:
        self._stream = documents(seed)
        self._tokenizer = tokenizer
        self._pool_size = pool
        self._pool: list[list[int]] = []
        self.num_documents = 0
        self.num_characters = 0

    def _refill(self) -> None:
        missing = self._pool_size - len(self._pool)
        texts = [document.text for document in itertools.islice(self._stream, missing)]
        self._pool += [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        self.num_documents += len(texts)
        self.num_characters += sum(map(len, texts))

    def _row(self, length: int) -> list[list[int]]:
        """Take whole documents, first fit, from the pool; only a document longer than a row is cut."""
        if len(self._pool) < self._pool_size // 2:
            self._refill()
        row = [self._pool.pop(0)[:length]]
        free = length - len(row[0])
        while (index := next((i for i, ids in enumerate(self._pool) if len(ids) <= free), None)) is not None:
            row.append(self._pool.pop(index))
            free -= len(row[-1])
        return row

    def batch(self, rows: int, length: int, *, restart_positions: bool) -> Batch:
        """Pack the next documents.

        Args:
            rows: how many rows.
            length: tokens in a row.
            restart_positions: count positions from 0 in each document, as a request does; otherwise along the row, so
                that the late positions are trained more often than by the few long documents.
        """
        input_ids = torch.zeros(rows, length, dtype=torch.int64)
        labels = torch.full((rows, length), IGNORED, dtype=torch.int64)
        position_ids = torch.arange(length).repeat(rows, 1)
        owner = torch.full((rows, length), -1)
        for row in range(rows):
            start = 0
            for number, tokens in enumerate(self._row(length)):
                end = start + len(tokens)
                input_ids[row, start:end] = torch.tensor(tokens)
                labels[row, start : end - 1] = torch.tensor(tokens[1:])
                owner[row, start:end] = number
                if restart_positions:
                    position_ids[row, start:end] = torch.arange(len(tokens))
                start = end
        visible = (owner[:, :, None] == owner[:, None, :]).tril()
        mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
        return Batch(input_ids, labels, position_ids, mask[:, None])


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Warm up linearly, stay, and fall linearly to zero over the last ``decay_share`` of ``steps``."""
    decay_steps = max(1, round(steps * recipe.decay_share))
    return recipe.learning_rate * min(1.0, (step + 1) / recipe.warmup_steps, (steps - step) / decay_steps)


def make_model(recipe: Recipe, tokenizer: Tokenizer) -> GPT2LMHeadModel:
    """A freshly initialised model of the recipe's shape."""
    stop_ids = stop_token_ids(tokenizer)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=recipe.n_positions,
        n_embd=recipe.n_embd,
        n_layer=recipe.n_layer,
        n_head=recipe.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=stop_ids[0],
        eos_token_id=stop_ids[0],
        pad_token_id=stop_ids[0],
        tie_word_embeddings=True,
        attn_implementation="eager",  # on a CPU in bfloat16 faster than "sdpa" at these widths,
    )
    return GPT2LMHeadModel(config)


def make_optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, biases and norms."""
    embedding = model.get_input_embeddings().weight
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and parameter is not embedding and "wpe" not in name
    ]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            momentum=recipe.muon_momentum,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=0.0, fused=True),
    ]


def train(
    recipe: Recipe, work: Path, make: Callable[[Recipe, Tokenizer], Model], *, max_minutes: float
) -> tuple[Model, Tokenizer, dict[str, Any]]:
    """Train a tokenizer and a model.

    Args:
        recipe: what to do.
        work: folder for the log and for checkpoints (every 200 steps).
        make: gives the model that is trained, whose head is its embedding.
        max_minutes: wall-clock limit. When the steps would not fit, the decay starts early and fewer steps are made; the
            record says how many, and the same recipe with that number of steps does the same again.

    Returns:
        The model (float32), its tokenizer, and the record of the run.
    """
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    tokenizer = train_tokenizer(
        document.text for document in itertools.islice(documents(recipe.seed), recipe.tokenizer_documents)
    )
    tokenizer_seconds = time.monotonic() - started
    model = make(recipe, tokenizer)
    optimizers = make_optimizers(model, recipe)
    packer = Packer(recipe.seed, tokenizer)
    started, cpu_started = time.monotonic(), time.process_time()
    steps, num_tokens, losses, curve = recipe.steps, 0, [], []
    step = 0
    while step < steps:
        elapsed = (time.monotonic() - started) / 60
        if elapsed > max_minutes * 1.1:
            break
        decay_step = round(steps * (1 - recipe.decay_share))
        if step < decay_step and elapsed > max_minutes * (1 - recipe.decay_share) * 0.98:
            steps = max(step + 1, round(step / (1 - recipe.decay_share)))
        length = recipe.row_lengths[step % len(recipe.row_lengths)]
        batch = packer.batch(recipe.tokens_per_step // length, length, restart_positions=length != recipe.n_positions)
        rate = learning_rate(recipe, step, steps)
        for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
            ).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        num_tokens += int((batch.labels != IGNORED).sum())
        losses.append(loss.item())
        step += 1
        if step % 50 == 0 or step == steps:
            mean = sum(losses[-50:]) / len(losses[-50:])
            curve.append(
                {
                    "step": step,
                    "loss": round(mean, 4),
                    "tokens": num_tokens,
                    "seconds": round(time.monotonic() - started, 1),
                }
            )
            print(
                f"step {step}/{steps}  loss {mean:.4f}  lr {rate:.2e}  {num_tokens / (time.monotonic() - started):.0f} tok/s",
                flush=True,
            )
        if step % 200 == 0:
            save_weights(model, work / "checkpoint.safetensors", torch.float32)
    save_weights(model, work / "checkpoint.safetensors", torch.float32)
    seconds = time.monotonic() - started
    record = {
        "recipe": asdict(recipe) | {"steps": steps},
        "planned_steps": recipe.steps,
        "stopped_at": step,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": num_tokens,
        "documents": packer.num_documents,
        "characters": packer.num_characters,
        "final_loss": round(sum(losses[-100:]) / len(losses[-100:]), 4),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
        "tokenizer_seconds": round(tokenizer_seconds, 1),
        "processor": processor_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "curve": curve,
    }
    (work / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return model.eval(), tokenizer, record


def processor_name() -> str:
    """The processor's name, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names: Iterator[str] = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def save_weights(model: PreTrainedModel, path: Path, dtype: torch.dtype) -> None:
    """Write the weights under the names of the Hugging Face hub; the head is tied to the embedding and not written."""
    prefix = model.base_model_prefix
    weights = {
        f"{prefix}.{name}": tensor.to(dtype).contiguous() for name, tensor in model.base_model.state_dict().items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def publish(model: GPT2LMHeadModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder in the layout of the Hugging Face hub, weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        key: getattr(model.config, key)
        for key in (
            "model_type",
            "vocab_size",
            "n_positions",
            "n_embd",
            "n_layer",
            "n_head",
            "activation_function",
            "layer_norm_epsilon",
            "initializer_range",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "bos_token_id",
            "eos_token_id",
            "tie_word_embeddings",
        )
    } | {"architectures": ["GPT2LMHeadModel"], "torch_dtype": "float16"}
    stop_ids = stop_token_ids(tokenizer)
    generation = {
        "bos_token_id": stop_ids[0],
        "eos_token_id": stop_ids,
        "pad_token_id": stop_ids[0],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    save_weights(model, folder / "model.safetensors", torch.float16)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(model.config.n_positions))
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if ids != list(range(len(SPECIAL_TOKENS))):
        raise ValueError(f"the special tokens should have the first ids, but have {ids}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
