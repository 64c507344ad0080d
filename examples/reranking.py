"""Documents in the order in which they answer a question, offline, with a reranker.

Without arguments the model in the package stands in for one: it was not trained for it, and its order means nothing.
The first argument names Qwen3-Reranker or another text model that answers "yes" or "no"::

    python examples/reranking.py Qwen/Qwen3-Reranker-0.6B no yes
"""

import sys
from pathlib import Path

from rustvllm import LLM

DOCUMENTS = ["Rain fell on the sea.", "The dog ran in the park.", "Mom made a cake."]
QUESTION = "What did the dog do?"
TEMPLATE = Path(__file__).with_name("qwen3_reranker.jinja")


def main() -> None:
    """Score each document with the question, and print the best first."""
    model, no, yes = (sys.argv[1:4]) if len(sys.argv) > 3 else (None, "Ġno", "Ġyes")
    tokens = {"classifier_from_token": [no, yes], "method": "from_2_way_softmax"}
    with LLM(model, convert="classify", hf_overrides=tokens, chat_template=TEMPLATE) as llm:
        outputs = llm.score(QUESTION, DOCUMENTS, use_tqdm=False)
    scores = [output.outputs.score for output in outputs]
    for score, document in sorted(zip(scores, DOCUMENTS, strict=True), reverse=True):
        print(f"{score:.3f}  {document!r}")


if __name__ == "__main__":
    main()
