"""Embeddings of sentences, offline, and which of them is closest to a question.

The model in the package was not trained for embeddings; name one that was to see what they can do::

    python examples/embeddings.py Qwen/Qwen3-Embedding-0.6B
"""

import sys

from rustvllm import LLM

SENTENCES = ["The dog ran in the park.", "Rain fell on the sea.", "Mom made a cake."]
QUESTION = "What did the dog do?"


def similarity(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors of length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def main() -> None:
    """Embed all and compare."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with LLM(model, runner="pooling") as llm:
        question, *sentences = (output.outputs.embedding for output in llm.embed([QUESTION, *SENTENCES]))
    print(f"{len(question)} numbers each")
    for text, vector in zip(SENTENCES, sentences, strict=True):
        print(f"{similarity(question, vector):.3f}  {text!r}")


if __name__ == "__main__":
    main()
