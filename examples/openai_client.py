"""Talk to a running server with the openai package: python openai_client.py [URL]."""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    completion = client.completions.create(model=model, prompt="Once upon a time", max_tokens=16, temperature=0)
    print(f"completion: {completion.choices[0].text!r}")
    messages = [{"role": "user", "content": "Tell me a story about a cat."}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
    print(f"chat: {chat.choices[0].message.content!r}")
    print("stream: ", end="")
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, temperature=0, stream=True
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
