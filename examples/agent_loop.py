"""An agent's two steps with a running server and the openai package: python agent_loop.py [URL].

It asks, runs the tool that the model calls, and sends the result back. tool_choice "required" makes the call come, and
come right, even from the model inside the package, which has learnt of no tools. That one's chat template knows none
either: start the server with --chat-template examples/tools.jinja.
"""

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str, unit: str) -> str:
    degrees = {"Paris": 18, "Rome": 24, "Oslo": 9}[city]
    return f"{degrees if unit == 'celsius' else degrees * 9 // 5 + 32} degrees {unit} in {city}"


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=100
    )
    said = asked.choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    for call in said.tool_calls or []:
        result = get_weather(**json.loads(call.function.arguments))
        print(f"called: {call.function.name}({call.function.arguments}) -> {result!r}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=40
    )
    print(f"answer: {answer.choices[0].message.content!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
