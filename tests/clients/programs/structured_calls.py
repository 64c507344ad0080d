"""Schemas through langchain-openai and litellm; prints what they hand to their callers, as JSON.

Arguments: base URL, model.
"""

import json
import sys
from typing import Literal

import litellm
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

PROMPT = "Tell me of an animal."


class Animal(BaseModel, extra="forbid"):
    """An animal."""

    kind: Literal["bird", "beast"]
    legs: int = Field(ge=2, le=4)


TOOL = {
    "type": "function",
    "function": {"name": "note_animal", "description": "Note it.", "parameters": Animal.model_json_schema()},
}
REQUIRED_SEEDS = range(8)


def langchain_required(url, name):
    """What ``bind_tools`` with ``required`` brings: arguments of whole calls, and why the answer ended."""
    found = []
    for seed in REQUIRED_SEEDS:
        asked = {"base_url": f"{url}/v1", "api_key": "none", "model": name, "seed": seed, "max_retries": 0}
        model = ChatOpenAI(**asked, max_tokens=200, temperature=1.0)
        answer = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke(PROMPT)
        calls = [[call["name"], call["args"]] for call in answer.tool_calls]
        found.append({"calls": calls, "finish_reason": answer.response_metadata["finish_reason"]})
    return found


def langchain(url, name):
    asked = {"base_url": f"{url}/v1", "api_key": "none", "model": name, "seed": 3, "max_retries": 0}
    model = ChatOpenAI(**asked, max_tokens=200, temperature=1.0)
    found = {}
    for method in ("json_schema", "function_calling"):
        bound = model.with_structured_output(Animal, method=method, include_raw=True)
        answer = bound.invoke(PROMPT)
        found[method] = {
            "parsed": None if answer["parsed"] is None else answer["parsed"].model_dump(),
            "finish_reason": answer["raw"].response_metadata["finish_reason"],
        }
    return found


def lite(url, name):
    asked = {"api_base": f"{url}/v1", "api_key": "none", "seed": 3, "num_retries": 0, "max_tokens": 200}
    asked |= {"model": f"hosted_vllm/{name}", "messages": [{"role": "user", "content": PROMPT}]}
    parsed = litellm.completion(**asked, response_format=Animal).choices[0]
    # As hosted_vllm it would leave additionalProperties out of the tool, and what is open goes on to the limit.
    tools = {"tools": [TOOL], "parallel_tool_calls": False, "model": f"openai/{name}"}
    named = {"type": "function", "function": {"name": "note_animal"}}
    found = {"schema": {"text": parsed.message.content, "finish_reason": parsed.finish_reason}}
    for kind, choice in (("required", "required"), ("named", named)):
        found[kind] = []
        for seed in REQUIRED_SEEDS:
            request = asked | tools | {"tool_choice": choice, "seed": seed, "max_tokens": 200}
            chunks = list(litellm.completion(**request, stream=True))
            answers = litellm.completion(**request), litellm.stream_chunk_builder(chunks)
            found[kind].append([calls_of(answer) for answer in answers])
    return found


def calls_of(answer):
    choice = answer.choices[0]
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    return {"calls": calls, "finish_reason": choice.finish_reason}


def main():
    url, name = sys.argv[1:]
    of_langchain = langchain(url, name) | {"required": langchain_required(url, name)}
    print(json.dumps({"langchain": of_langchain, "litellm": lite(url, name)}))


if __name__ == "__main__":
    main()
