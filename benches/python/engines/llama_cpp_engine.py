"""llama.cpp, through ``llama-cpp-python``, with all prompts in one context; the GGUF file is ``settings["converted"]``.

``LLAMA_CPP_BATCH`` is how many tokens of a step it computes at once (512). ``LLAMA_CPP_REPACK=0`` leaves weights in the
order of the file. A batch of 1, or that setting, lets it run where its products of several rows crash the process, as
on machines with AMX.
"""

import os
from typing import Any

from worker import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    """Load a context with a sequence for each prompt; every token is the argmax of its logits."""
    import llama_cpp
    import numpy as np

    if settings.get("drafts"):
        return look_up(settings)
    threads, num_seqs, max_len = settings["num_threads"], settings["max_num_seqs"], settings["max_model_len"]
    most = int(os.environ.get("LLAMA_CPP_BATCH", "512"))
    llama_cpp.llama_backend_init()
    of_model = llama_cpp.llama_model_default_params()
    of_model.use_extra_bufts = os.environ.get("LLAMA_CPP_REPACK", "1") != "0"
    model = llama_cpp.llama_model_load_from_file(settings["converted"].encode(), of_model)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = num_seqs * max_len
    params.n_batch = params.n_ubatch = most
    params.n_seq_max = num_seqs
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = False
    context = llama_cpp.llama_init_from_model(model, params)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(most, 0, 1)

    def compute(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows of sequence, position, token and whether to choose a next token; returns the chosen ones."""
        drawn: list[int] = []
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            batch.n_tokens = len(part)
            for index, (sequence, position, token, is_last) in enumerate(part):
                batch.token[index], batch.pos[index], batch.logits[index] = token, position, is_last
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            if llama_cpp.llama_decode(context, batch) != 0:
                raise SystemExit("llama.cpp did not compute a step")
            for index, (*_, is_last) in enumerate(part):
                if is_last:
                    logits = llama_cpp.llama_get_logits_ith(context, index)
                    drawn.append(int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax()))
        return drawn

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        first = [
            (sequence, place, token, place + 1 == len(ids))
            for sequence, ids in enumerate(prompts)
            for place, token in enumerate(ids)
        ]
        outputs = [[token] for token in compute(first)]
        for step in range(max_tokens - 1):
            rows = [(seq, len(ids) + step, outputs[seq][-1], True) for seq, ids in enumerate(prompts)]
            for output, token in zip(outputs, compute(rows), strict=True):
                output.append(token)
        return outputs

    return generate


def look_up(settings: dict[str, Any]) -> Generate:
    """Load a model that looks up drafts in its own tokens, one prompt after another."""
    import itertools

    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafts, threads = settings["drafts"], settings["num_threads"]
    lookup = LlamaPromptLookupDecoding(drafts["prompt_lookup_max"], drafts["num_speculative_tokens"])
    llm = Llama(
        settings["converted"],
        n_ctx=settings["max_model_len"],
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=lookup,
        logits_all=True,
        verbose=False,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        outputs = []
        for ids in prompts:
            llm.reset()
            outputs.append(list(itertools.islice(llm.generate(ids, temp=0.0, repeat_penalty=1.0), max_tokens)))
        return outputs

    return generate


if __name__ == "__main__":
    serve(load)
