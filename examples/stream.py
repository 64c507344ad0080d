"""Stream several answers at once from one event loop."""

import asyncio

from rustvllm import AsyncEngineArgs, AsyncLLM, SamplingParams

PROMPTS = {"a": "Once upon a time", "b": "The little dog", "c": "In the forest"}


async def follow(engine: AsyncLLM, request_id: str, prompt: str) -> str:
    num_updates, num_tokens, text = 0, 0, ""
    async for output in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=24), request_id):
        num_updates += 1  # mostly one per token; a reader that falls behind gets several tokens in one update
        num_tokens, text = len(output.outputs[0].token_ids), output.outputs[0].text
    print(f"{request_id}: {num_tokens} tokens in {num_updates} updates, {prompt + text!r}")
    return text


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs())
    try:
        await asyncio.gather(*(follow(engine, request_id, prompt) for request_id, prompt in PROMPTS.items()))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
