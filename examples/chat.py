"""Answer conversations; the model's chat template makes the prompts."""

from rustvllm import LLM, SamplingParams

CONVERSATIONS = [
    [{"role": "user", "content": "Tell me a story about a cat."}],
    [
        {"role": "system", "content": "You tell short stories."},
        {"role": "user", "content": "Tell me a story about a boat."},
    ],
]


def main() -> None:
    llm = LLM()
    params = SamplingParams(temperature=0, max_tokens=48)
    for conversation, output in zip(CONVERSATIONS, llm.chat(CONVERSATIONS, params), strict=True):
        print(f"user: {conversation[-1]['content']}\nassistant: {output.outputs[0].text.strip()}\n")


if __name__ == "__main__":
    main()
