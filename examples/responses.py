"""The Responses API of a running server with the openai package: python responses.py [URL]."""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    items = [{"role": "user", "content": "Tell me a story about a cat."}]
    print("stream: ", end="")
    with client.responses.stream(model=model, input=items, max_output_tokens=16, temperature=0) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            elif event.type in ("response.completed", "response.incomplete"):
                answer = event.response
    print(f"\nstatus: {answer.status}, {answer.usage.output_tokens} tokens")
    # The server stores nothing: the conversation goes on with the items so far.
    items += [item.model_dump(exclude_none=True) for item in answer.output]
    items.append({"role": "user", "content": "And a dog?"})
    answer = client.responses.create(model=model, input=items, max_output_tokens=16, temperature=0)
    print(f"answer: {answer.output_text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
