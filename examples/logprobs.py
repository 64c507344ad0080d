"""Print what the model might have said at each place, with its log-probabilities."""

from rustvllm import LLM, SamplingParams


def main() -> None:
    llm = LLM()
    [output] = llm.generate("Once upon a", SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    [sample] = output.outputs
    assert sample.logprobs is not None
    for token_id, candidates in zip(sample.token_ids, sample.logprobs, strict=True):
        best = sorted(candidates.values(), key=lambda candidate: -candidate.logprob)
        shown = "  ".join(f"{candidate.decoded_token!r} {candidate.logprob:.2f}" for candidate in best)
        print(f"{token_id:5}  {shown}")


if __name__ == "__main__":
    main()
