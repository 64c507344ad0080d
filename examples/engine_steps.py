"""Drive the engine step by step: requests arrive while others run, one is aborted."""

from rustvllm import EngineArgs, LLMEngine, SamplingParams


def main() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(max_num_seqs=4))
    params = SamplingParams(temperature=0, max_tokens=12)
    arrivals = {0: ("first", "Once upon a time"), 3: ("second", "The little dog"), 5: ("third", "In the forest")}
    step = 0
    while arrivals or engine.has_unfinished_requests():
        if step in arrivals:
            engine.add_request(*arrivals.pop(step), params)
        for output in engine.step():
            [sample] = output.outputs
            state = sample.finish_reason or "running"
            print(f"step {step:2}  {output.request_id:6}  {len(sample.token_ids):2} tokens  {state}")
        if step == 8:
            engine.abort_request("third")
        step += 1


if __name__ == "__main__":
    main()
