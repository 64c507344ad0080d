"""transformers, through ``generate`` over one batch."""

from typing import Any

from worker import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    """Load the model with its default attention (sdpa)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()

    drafts = settings.get("drafts")
    lookup = {"prompt_lookup_num_tokens": drafts["num_speculative_tokens"]} if drafts else {}
    if drafts:
        lookup["max_matching_ngram_size"] = drafts["prompt_lookup_max"]

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
            **lookup,
        )
        answers: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return answers

    return generate


if __name__ == "__main__":
    serve(load)
