"""Calls the server through langchain-openai; prints what came back, one JSON object by the names of the calls.

Arguments: base URL, model.
"""

import asyncio
import json
import sys

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

PROMPT = "Once upon a time"


def chat(message):
    return {
        "text": message.content,
        "finish_reason": message.response_metadata.get("finish_reason"),
        "usage": {name: message.usage_metadata[name] for name in ("input_tokens", "output_tokens", "total_tokens")},
    }


def streamed(chunks):
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return {**chat(whole), "num_chunks": len(chunks)}


async def collect(chunks):
    return [chunk async for chunk in chunks]


async def asynchronous(model, completions):
    return {
        "ainvoke": chat(await model.ainvoke(PROMPT)),
        "astream": streamed(await collect(model.astream(PROMPT))),
        "abatch": [chat(message) for message in await model.abatch([PROMPT] * 4)],
        "completions_ainvoke": await completions.ainvoke(PROMPT),
    }


def error(model):
    try:
        model.invoke(PROMPT)
    except openai.APIStatusError as exc:
        return {"type": type(exc).__name__, "status": exc.status_code, "message": str(exc)}
    return None


def main():
    url, name = sys.argv[1:]
    asked = {"base_url": f"{url}/v1", "api_key": "none", "model": name, "temperature": 0, "max_retries": 0}
    model = ChatOpenAI(**asked, max_tokens=12, stream_usage=True)
    completions = OpenAI(**asked, max_tokens=12)
    conversation = [
        SystemMessage("You are brief."),
        HumanMessage("Hello"),
        AIMessage("Hi."),
        HumanMessage([{"type": "text", "text": PROMPT}]),
    ]
    text = model.invoke(PROMPT).content
    found = {
        "invoke": chat(model.invoke(PROMPT)),
        "conversation": chat(model.invoke(conversation)),
        "stream": streamed(list(model.stream(PROMPT))),
        "batch": [chat(message) for message in model.batch([PROMPT, "Hello", PROMPT])],
        "stop": chat(model.bind(stop=[text.split()[-1]]).invoke(PROMPT)),
        "logprobs": model.bind(logprobs=True, top_logprobs=2).invoke(PROMPT).response_metadata["logprobs"],
        "completions": completions.invoke(PROMPT),
        "completions_stream": "".join(completions.stream(PROMPT)),
        "completions_batch": completions.batch([PROMPT, PROMPT]),
        "completions_generate": completions.generate([PROMPT, PROMPT]).llm_output["token_usage"],
        "unknown_model": error(ChatOpenAI(**{**asked, "model": "nothing"})),
        **asyncio.run(asynchronous(model, completions)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
