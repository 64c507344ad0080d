"""Complete texts with a running server and the openai package: python completion_client.py [--stream] [URL]."""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--stream", action="store_true", help="print each choice as it comes")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="EMPTY")
    model = client.models.list().data[0].id
    completion = client.completions.create(
        model=model, prompt="A dog and a cat", n=2, max_tokens=12, logprobs=3, stream=args.stream
    )
    if args.stream:
        for chunk in completion:
            for choice in chunk.choices:
                print(f"choice {choice.index}: {choice.text!r}")
    else:
        for choice in completion.choices:
            print(f"choice {choice.index}: {choice.text!r}, {len(choice.logprobs.tokens)} log-probabilities")


if __name__ == "__main__":
    main()
