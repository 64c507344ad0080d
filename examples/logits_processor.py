"""Change the logits of one request with a function: here no token may come twice."""

from typing import TYPE_CHECKING

from rustvllm import LLM, SamplingParams

if TYPE_CHECKING:
    import torch


def never_twice(output_ids: list[int], logits: "torch.Tensor") -> "torch.Tensor":
    """Forbid the tokens that the answer has already.

    Args:
        output_ids: Ids of the answer so far.
        logits: Scores of the next token, [vocab_size].
    """
    if output_ids:
        logits[list(set(output_ids))] = float("-inf")
    return logits


def main() -> None:
    llm = LLM()
    params = SamplingParams(temperature=0, max_tokens=24)
    for name, chosen in (("plain", params), ("never twice", params.clone(logits_processors=[never_twice]))):
        [sample] = llm.generate("The dog ran and", chosen, use_tqdm=False)[0].outputs
        print(f"{name}: {len(set(sample.token_ids))} different tokens of {len(sample.token_ids)}: {sample.text!r}")


if __name__ == "__main__":
    main()
