"""Evaluates the local tasks through lm_eval, with its client of completions and with its own transformers backend.

Prints, as one JSON object, what each backend found for each sample: log-likelihoods with their greedy flags, rolling
log-likelihoods, and generated texts. Arguments: base URL, model's name, its checkpoint, the tasks, a folder for caches.
"""

import json
import os
import sys

URL, MODEL, CHECKPOINT, TASKS, CACHE = sys.argv[1:]
os.environ["HF_HOME"] = CACHE
os.chdir(TASKS)  # the data files of the tasks are named relative to their folder

import lm_eval  # noqa: E402 (reads its environment when it is imported)
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

CONTEXT = 128
"""Shorter than the model's, so that a rolling text needs several windows without taking long."""
TASK_NAMES = ("local_choices", "local_stories", "local_continuations")


def through_the_server(**how):
    """A client as its users set it up: our tokenizer's files, and requests as ids or as text."""
    return LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions",
        model=MODEL,
        tokenizer=CHECKPOINT,
        tokenizer_backend="huggingface",
        max_length=CONTEXT + 2,  # it keeps one for the token it must ask for, and one more in a window
        **how,
    )


def evaluated(model):
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(TASK_NAMES),
        task_manager=TaskManager(include_path=TASKS, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return {
        task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in found["samples"].items()
    }


def main():
    print(
        json.dumps(
            {
                "transformers": evaluated(
                    HFLM(pretrained=CHECKPOINT, dtype="float32", device="cpu", batch_size=1, max_length=CONTEXT)
                ),
                "ids": evaluated(through_the_server(tokenized_requests=True, num_concurrent=8)),
                "texts": evaluated(through_the_server(tokenized_requests=False, batch_size=1)),
                "batches": evaluated(through_the_server(tokenized_requests=True, batch_size=4)),
            }
        )
    )


if __name__ == "__main__":
    main()
