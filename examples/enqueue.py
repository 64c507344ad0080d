"""Queue prompts now, answer them later, and follow each request's status in the scheduler meanwhile."""

from rustvllm import LLM, SamplingParams


def show(request_id: str, old: str | None, new: str) -> None:
    """Print a change of a request's status."""
    print(f"request {request_id}: {old or 'new'} -> {new}")


def main() -> None:
    llm = LLM(max_num_seqs=2, on_status_change=show)
    params = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.enqueue(["Once upon a time", "The little dog"], params)
    ids += llm.enqueue("In the forest", params)
    print(f"queued: {ids}")
    llm.llm_engine.step()  # one step by hand; the others are those of wait_for_completion
    scheduler = llm.llm_engine.engine_core.scheduler
    print(scheduler)
    for request in scheduler.running:
        print(request)
    for output in llm.wait_for_completion():
        print(f"{output.request_id}: {output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
