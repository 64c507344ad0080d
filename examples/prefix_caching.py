"""Ask several questions after one long text: its tokens are computed for the first question alone."""

from rustvllm import LLM, SamplingParams

STORY = "Once upon a time there was a little girl named Lily. She had a red ball and a small dog. " * 12
QUESTIONS = ["The dog", "Lily said", "Her mom"]


def main() -> None:
    llm = LLM()
    params = SamplingParams(temperature=0, max_tokens=12)
    for question in QUESTIONS:
        [output] = llm.generate(STORY + question, params, use_tqdm=False)
        total = len(output.prompt_token_ids)
        print(f"{question!r}: {output.num_cached_tokens} of {total} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
