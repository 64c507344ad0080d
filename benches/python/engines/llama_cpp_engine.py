"""llama.cpp, by ``llama-cpp-python``; the GGUF file is ``settings["converted"]``. One prompt after the other.

``LLAMA_CPP_BATCH`` is how many tokens of a prompt it computes at once (512): with 1 it runs where its products of
several rows meet an instruction that the machine refuses.
"""

import os
from typing import Any

from worker import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    """A context for one sequence; every token is the argmax of its logits."""
    import numpy as np
    from llama_cpp import Llama

    threads = settings["num_threads"]
    llama = Llama(
        settings["converted"],
        n_ctx=settings["max_model_len"],
        n_batch=int(os.environ.get("LLAMA_CPP_BATCH", "512")),
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def answer(ids: list[int], max_tokens: int) -> list[int]:
        llama.reset()
        llama.eval(ids)
        drawn: list[int] = []
        while True:
            logits = np.ctypeslib.as_array(llama._ctx.get_logits(), (llama.n_vocab(),))  # noqa: SLF001 -- no other way
            drawn.append(int(logits.argmax()))
            if len(drawn) == max_tokens:
                return drawn
            llama.eval(drawn[-1:])

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return [answer(ids, max_tokens) for ids in prompts]

    return generate


if __name__ == "__main__":
    serve(load)
