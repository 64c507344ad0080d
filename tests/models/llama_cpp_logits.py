"""llama.cpp's likeliest token after every token of some sequences, with its margin over the next: a program of its own.

Runs under an interpreter that has ``llama_cpp``. One JSON line in, ``{"file": path, "sequences": [[id, …], …]}``, and
one out: for each sequence ``[[id, margin], …]``, one after each of its tokens.
"""

import json
import os
import sys

import llama_cpp
import numpy as np

NUM_THREADS = 2
MOST = 512


def main():
    # What the library prints must not get among the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    of_model = llama_cpp.llama_model_default_params()
    of_model.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(order["file"].encode(), of_model)
    if not model:
        raise SystemExit(f"llama.cpp does not load {order['file']}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = MOST
    params.n_threads = params.n_threads_batch = NUM_THREADS
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32  # as ours; its own choice is F16
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp makes no context")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    answer = [likeliest(context, ids, vocab_size) for ids in order["sequences"]]
    print(json.dumps(answer), file=answers, flush=True)


def likeliest(context, ids, vocab_size):
    """A sequence in an empty cache, at once."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, True
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit("llama.cpp did not compute a sequence")
    found = []
    for place in range(len(ids)):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, place), (vocab_size,))
        second, first = np.partition(logits, -2)[-2:]
        found.append([int(logits.argmax()), float(first - second)])
    llama_cpp.llama_batch_free(batch)
    return found


if __name__ == "__main__":
    main()
