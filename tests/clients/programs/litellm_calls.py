"""Calls the server through litellm; prints what came back, one JSON object by the names of the calls.

Arguments: base URL, model.
"""

import asyncio
import json
import sys

import litellm
import openai

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
PROMPT = "Once upon a time"


def usage(answer):
    return {name: getattr(answer.usage, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def chat(answer):
    choice = answer.choices[0]
    return {
        "text": choice.message.content,
        "role": choice.message.role,
        "finish_reason": choice.finish_reason,
        "usage": usage(answer),
    }


def stream(chunks):
    text, reasons, usages = "", [], []
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
        if getattr(chunk, "usage", None):
            usages.append(usage(chunk))
    return {"text": text, "finish_reasons": reasons, "usages": usages}


async def collect(chunks):
    return [chunk async for chunk in chunks]


async def asynchronous(asked):
    one, several, chunks = await asyncio.gather(
        litellm.acompletion(messages=MESSAGES, **asked),
        asyncio.gather(*(litellm.acompletion(messages=MESSAGES, **asked) for _ in range(8))),
        litellm.acompletion(messages=MESSAGES, stream=True, **asked),
    )
    return {
        "acompletion": chat(one),
        "eight_at_once": [chat(answer) for answer in several],
        "acompletion_stream": stream(await collect(chunks)),
    }


def error(call, **asked):
    try:
        call(**asked)
    except openai.APIStatusError as exc:
        return {"type": type(exc).__name__, "status": exc.status_code, "message": str(exc)}
    return None


def main():
    url, model = sys.argv[1:]
    found = {}
    for provider in ("openai", "hosted_vllm"):
        asked = {
            "model": f"{provider}/{model}",
            "api_base": f"{url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 12,
            "num_retries": 0,
            "timeout": 60,
        }
        found[provider] = {
            "completion": chat(litellm.completion(messages=MESSAGES, **asked)),
            "stream": stream(
                litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked)
            ),
            "extra_body": chat(
                litellm.completion(messages=MESSAGES, extra_body={"truncate_prompt_tokens": 2}, **asked)
            ),
            "logprobs": litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=2, **asked)
            .choices[0]
            .logprobs.model_dump(),
            **asyncio.run(asynchronous(asked)),
            "unknown_model": error(litellm.completion, messages=MESSAGES, **{**asked, "model": f"{provider}/nothing"}),
            "bad_temperature": error(litellm.completion, messages=MESSAGES, **{**asked, "temperature": 9}),
        }
    # Completions go by the provider for them; the model keeps its name.
    asked = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0}
    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt=PROMPT, **asked)
    parts = list(litellm.text_completion(model=f"text-completion-openai/{model}", prompt=PROMPT, stream=True, **asked))
    found["text"] = {
        "text": text.choices[0].text,
        "finish_reason": text.choices[0].finish_reason,
        "usage": usage(text),
        "streamed": "".join(part.choices[0].text or "" for part in parts if part.choices),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
