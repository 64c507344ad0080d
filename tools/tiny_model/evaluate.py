"""Measurements of the shipped folder on held-out text, written as JSON and into the figures section of the document."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,  # noqa: TID251 - these figures must not depend on the engine that ships the model
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tiny_model import questions, reckoning
from tiny_model.corpus import Document, documents, is_held_out, normalise
from tiny_model.dialogues import as_typed
from tiny_model.grammar import capitalise

SEED = 7
NGRAM = 8
MAX_NEW_TOKENS = 128
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": 0}
OPENINGS = (
    "Once upon a time",
    "Hello, my name is",
    "One morning,",
    "The",
    "In the garden",
    "Today is",
    "My favourite",
    "There was once",
)
EXACT_KINDS = (
    questions.capital,
    questions.opposite,
    questions.colour,
    questions.size,
    questions.use,
    questions.job,
    reckoning.calendar,
    reckoning.arithmetic,
    reckoning.count,
    questions.definition,
    questions.explained,
)
FIGURES_BEGIN, FIGURES_END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Answer:
    """What the model wrote after a prompt, and whether it stopped by itself."""

    prompt: str
    text: str
    ended: bool


class Speaker:
    """A model with its tokenizer, answering prompts in seeded batches."""

    def __init__(self, folder: Path, weights: Path | None = None) -> None:
        """Load ``folder`` in float32; with ``weights``, replace its weights by that file's."""
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if weights is not None:
            missing, unexpected = self.model.load_state_dict(load_file(weights), strict=False)
            if unexpected or set(missing) - {"lm_head.weight"}:
                raise ValueError(f"{weights} does not fit {folder}: missing {missing}, unexpected {unexpected}")
        self.stop_ids = set(self.model.generation_config.eos_token_id)

    def chat(self, prompts: Sequence[str], **sampling: Any) -> list[Answer]:
        """Answer each prompt as the first user message of a chat."""
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        return [
            Answer(prompt, answer.text, answer.ended)
            for prompt, answer in zip(prompts, self.continued(texts, **sampling), strict=True)
        ]

    def continued(self, texts: Sequence[str], batch_size: int = 64, **sampling: Any) -> list[Answer]:
        """Continue each text by at most `MAX_NEW_TOKENS` tokens, greedily unless ``sampling`` says otherwise."""
        torch.manual_seed(SEED)
        options = {"do_sample": False, "temperature": None, "top_p": None} | sampling
        answers = []
        for start in range(0, len(texts), batch_size):
            batch = list(texts[start : start + batch_size])
            inputs = self.tokenizer(batch, return_tensors="pt", padding=True, padding_side="left")
            output = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
                pad_token_id=0,
                **options,
            )
            for text, row in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                end = next((index for index, token in enumerate(row) if token in self.stop_ids), None)
                answers.append(Answer(text, self.tokenizer.decode(row[:end]).strip(), end is not None))
        return answers

    @torch.inference_mode()
    def surprise(self, held_out: Sequence[Document], batch_size: int = 16) -> dict[str, float]:
        """Negative log-likelihood of documents, every token after the first counted.

        Returns:
            Perplexity per token and per byte of text, and perplexity of the assistant's answers alone.
        """
        assistant, end = self.tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
        total = answers = 0.0
        num_tokens = num_answers = num_bytes = 0
        for start in range(0, len(held_out), batch_size):
            rows = [
                self.tokenizer(document.text)["input_ids"][: self.model.config.n_positions]
                for document in held_out[start : start + batch_size]
            ]
            input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
            for index, row in enumerate(rows):
                input_ids[index, : len(row)] = torch.tensor(row)
            log_probs = self.model(input_ids, attention_mask=torch.ones_like(input_ids)).logits[:, :-1].log_softmax(-1)
            losses = -log_probs.gather(-1, input_ids[:, 1:, None])[..., 0]
            for index, row in enumerate(rows):
                loss = losses[index, : len(row) - 1].tolist()
                speaking = [False] * len(row)
                for position, token in enumerate(row):
                    speaking[position] = token == assistant or (
                        position > 0 and speaking[position - 1] and token != end
                    )
                total += sum(loss)
                num_tokens += len(loss)
                answers += sum(value for value, counts in zip(loss, speaking, strict=False) if counts)
                num_answers += sum(speaking[:-1])
                num_bytes += len(self.tokenizer.decode(row[1:]).encode())
        return {
            "perplexity_per_token": round(math.exp(total / num_tokens), 4),
            "perplexity_per_byte": round(math.exp(total / num_bytes), 4),
            "perplexity_of_answers_per_token": round(math.exp(answers / num_answers), 4),
            "tokens": num_tokens,
        }


class NgramIndex:
    """The set of word 8-grams of a text collection, as sorted 64-bit hashes."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._words: dict[str, int] = {}
        self._rng = random.Random(SEED)
        self._hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *(self._ngrams(text) for text in texts)]))

    def _ngrams(self, text: str) -> np.ndarray:
        words = normalise(text).split()
        numbers = np.array([self._words.setdefault(word, self._rng.getrandbits(64)) for word in words], dtype=np.uint64)
        if len(numbers) < NGRAM:
            return np.empty(0, np.uint64)
        result = np.zeros(len(numbers) - NGRAM + 1, np.uint64)
        for offset in range(NGRAM):
            result = result * np.uint64(0x9E3779B97F4A7C15) + numbers[offset : offset + len(result)]
        return result

    def __len__(self) -> int:
        return len(self._hashes)

    def unseen_share(self, texts: Iterable[str]) -> float:
        """Share of the texts' 8-grams that are not in the collection."""
        wanted = np.concatenate([np.empty(0, np.uint64), *(self._ngrams(text) for text in texts)])
        return round(float(1 - np.isin(wanted, self._hashes).mean()), 4) if len(wanted) else math.nan


def held_out_prompts(seed: int, count: int) -> list[str]:
    """The first ``count`` different held-out prompts that open a chat."""
    chats = (document.prompts[0] for document in documents(seed, held_out=True) if document.is_chat)
    chosen: dict[str, str] = {}
    for prompt in chats:
        chosen.setdefault(normalise(prompt), prompt)
        if len(chosen) == count:
            break
    return list(chosen.values())


def exact_questions(maker: Any, count: int, draws: int = 30_000) -> dict[str, set[str]]:
    """Held-out questions of one kind, each with every answer the generator accepts for it."""
    rng = random.Random(f"{SEED}/{maker.__name__}")
    accepted: dict[str, set[str]] = {}
    for _ in range(draws):
        ask, answer = maker(rng)
        accepted.setdefault(ask, set()).add(normalise(answer))
    wanted: dict[str, set[str]] = {}
    for ask, answers in accepted.items():
        prompt = as_typed(rng, ask)
        if is_held_out(prompt) and len(wanted) < count:
            wanted[prompt] = answers
    return wanted


def evaluate(folder: Path, work: Path, document_path: Path, *, quick: bool = False) -> dict[str, Any]:
    """Measure ``folder`` and write ``evaluation.json`` to ``work`` and the figures into ``document_path``.

    Needs ``training.json`` and ``checkpoint.safetensors`` of the run in ``work``.
    """
    torch.set_num_threads(2)
    training = json.loads((work / "training.json").read_text())
    seed, num_documents = training["recipe"]["seed"], training["documents"]
    num_prompts, num_texts = (20, 40) if quick else (240, 1000)
    speaker = Speaker(folder)
    held_out = list(itertools.islice(documents(seed, held_out=True), num_texts))
    prompts = held_out_prompts(seed, num_prompts)
    openings = [*OPENINGS] * (1 if quick else 15)
    greedy, sampled = speaker.chat(prompts), speaker.chat(prompts, **SAMPLING)
    plain = speaker.continued(openings, **SAMPLING)
    training_texts = itertools.islice(documents(seed), 2000 if quick else num_documents)
    index = NgramIndex(message.content for document in training_texts for message in document.messages)
    kinds = {}
    for maker in EXACT_KINDS:
        wanted = exact_questions(maker, 10 if quick else 60)
        answers = speaker.chat(list(wanted))
        kinds[maker.__name__] = {
            "right": sum(normalise(answer.text) in wanted[answer.prompt] for answer in answers),
            "asked": len(answers),
        }
    shipped = speaker.surprise(held_out)
    full = Speaker(folder, work / "checkpoint.safetensors")
    full_greedy = full.chat(prompts)
    result = {
        "seed": SEED,
        "held_out": shipped | {"documents": len(held_out)},
        "ended_by_itself": {
            "prompts": len(prompts),
            "max_new_tokens": MAX_NEW_TOKENS,
            "greedy": _share(greedy),
            "temperature_0.7": _share(sampled),
            "plain_text_temperature_0.7": _share(plain),
        },
        "unseen_8grams": {
            "training_8grams": len(index),
            "greedy": index.unseen_share(answer.text for answer in greedy),
            "temperature_0.7": index.unseen_share(answer.text for answer in sampled),
            "plain_text_temperature_0.7": index.unseen_share(answer.prompt + " " + answer.text for answer in plain),
            "held_out_documents": index.unseen_share(
                message.content for document in held_out for message in document.messages
            ),
        },
        "right_answers": kinds,
        "float16": {
            "same_greedy_answers": sum(a.text == b.text for a, b in zip(greedy, full_greedy, strict=True)),
            "of": len(prompts),
            "perplexity_float16_weights": shipped["perplexity_per_token"],
            "perplexity_float32_weights": full.surprise(held_out)["perplexity_per_token"],
        },
        "answers": [{"prompt": answer.prompt, "answer": answer.text, "ended": answer.ended} for answer in greedy[:20]],
        "continuations": [
            {"prompt": answer.prompt, "answer": answer.text, "ended": answer.ended} for answer in plain[: len(OPENINGS)]
        ],
    }
    (work / "evaluation.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if not quick:
        text = document_path.read_text()
        before, after = text.split(FIGURES_BEGIN)[0], text.split(FIGURES_END)[1]
        document_path.write_text(f"{before}{FIGURES_BEGIN}\n{figures(training, result)}\n{FIGURES_END}{after}")
    print(
        json.dumps({key: value for key, value in result.items() if key not in ("answers", "continuations")}, indent=1)
    )
    return result


def _share(answers: Sequence[Answer]) -> float:
    return round(sum(answer.ended for answer in answers) / len(answers), 4)


def figures(training: dict[str, Any], result: dict[str, Any]) -> str:
    """The figures section of the document, in Markdown."""
    recipe, versions = training["recipe"], training["versions"]
    held_out, ended, unseen, rounding = (
        result[key] for key in ("held_out", "ended_by_itself", "unseen_8grams", "float16")
    )
    right = sum(kind["right"] for kind in result["right_answers"].values())
    asked = sum(kind["asked"] for kind in result["right_answers"].values())
    lines = [
        "### The run",
        "",
        f"`python tools/train_tiny_model.py train --seed {recipe['seed']} --steps {recipe['steps']} --max-minutes 1000`",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {training['parameters']:,} |",
        f"| seed | {recipe['seed']} |",
        f"| steps | {training['stopped_at']:,} of {recipe['tokens_per_step']:,} tokens each, padding included |",
        f"| tokens trained on | {training['tokens']:,}, each once |",
        f"| documents read | {training['documents']:,} different ones, {training['characters'] / 1e6:.1f} million characters |",
        f"| loss at the end | {training['final_loss']} (mean of the last 100 steps, nats per token) |",
        f"| time | {training['seconds'] / 60:.1f} minutes wall clock, {training['cpu_seconds'] / 60:.1f} minutes of processor time, and {training['tokenizer_seconds']:.0f} s for the tokenizer |",
        f"| machine | {recipe['threads']} cores of {training['processor']}, shared with other work at the time |",
        f"| versions | Python {versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}, tokenizers {versions['tokenizers']} |",
        "",
        "### The figures",
        "",
        "| | |",
        "|---|---|",
        f"| perplexity on {held_out['documents']:,} held-out documents | {held_out['perplexity_per_token']:.2f} per token, {held_out['perplexity_per_byte']:.3f} per byte |",
        f"| the same, assistant's answers only | {held_out['perplexity_of_answers_per_token']:.2f} per token |",
        f"| answers that end by themselves within {ended['max_new_tokens']} tokens, {ended['prompts']} held-out prompts | {ended['greedy']:.1%} greedy, {ended['temperature_0.7']:.1%} at temperature 0.7 |",
        f"| plain continuations that end by themselves within {ended['max_new_tokens']} tokens, temperature 0.7 | {ended['plain_text_temperature_0.7']:.1%} |",
        f"| word 8-grams of its answers that are not in the training text | {unseen['greedy']:.1%} greedy, {unseen['temperature_0.7']:.1%} at temperature 0.7 |",
        f"| the same for plain continuations, temperature 0.7 | {unseen['plain_text_temperature_0.7']:.1%} |",
        f"| for comparison: the held-out documents themselves | {unseen['held_out_documents']:.1%} |",
        f"| float16 weights against float32 weights | perplexity {rounding['perplexity_float16_weights']:.4f} and {rounding['perplexity_float32_weights']:.4f}; {rounding['same_greedy_answers']} of {rounding['of']} greedy answers are the same |",
        "",
        f"Of {asked} held-out questions with a fixed set of good answers, {right} were answered with one of them word for word (greedy):",
        "",
        "| kind | right | asked |",
        "|---|---:|---:|",
        *(f"| {name} | {kind['right']} | {kind['asked']} |" for name, kind in result["right_answers"].items()),
        "",
        "### Twenty held-out prompts",
        "",
        "The first twenty of the list, not a selection; greedy answers.",
        "",
        *(
            f"{number}. **{_line(item['prompt'])}**<br>{_line(item['answer'])}{'' if item['ended'] else ' … (cut)'}"
            for number, item in enumerate(result["answers"], 1)
        ),
        "",
        "### Plain text",
        "",
        "The first continuation of each opening, at temperature 0.7.",
        "",
        *(
            f"- **{item['prompt']}** {_line(item['answer'])}{'' if item['ended'] else ' … (cut)'}"
            for item in result["continuations"]
        ),
    ]
    return "\n".join(lines)


def _line(text: str) -> str:
    return capitalise(text).replace("\n", " / ").replace("|", "\\|").replace("*", "\\*")
