"""Complete several prompts at once."""

from rustvllm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The little dog", "One day, Tom and Lily", "In the forest"]


def main() -> None:
    llm = LLM()  # or LLM("gpt2"), or a folder
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=7)
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
