"""CTranslate2, through ``Generator.generate_batch``; its converted model is in ``settings["converted"]``.

It computes in the type that the engine's name has after a dash (``ctranslate2-int8``), else in the configured dtype.
"""

import json
from pathlib import Path
from typing import Any

from worker import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    """Load a generator in the configured dtype; it takes tokens by name."""
    import ctranslate2

    names = json.loads((Path(settings["converted"]) / "vocabulary.json").read_text(encoding="utf-8"))
    compute_type = settings["name"].partition("-")[2] or settings["dtype"]
    generator = ctranslate2.Generator(
        settings["converted"], device="cpu", compute_type=compute_type, intra_threads=settings["num_threads"]
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        results = generator.generate_batch(
            [[names[token] for token in ids] for ids in prompts],
            max_batch_size=settings["max_num_seqs"],
            max_length=max_tokens,
            min_length=max_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [list(result.sequences_ids[0]) for result in results]

    return generate


if __name__ == "__main__":
    serve(load)
