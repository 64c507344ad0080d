"""Print each record of a request's way through the engine."""

from rustvllm import LLM, SamplingParams
from rustvllm.observe.trace.tracer import TraceRecord


def show(record: TraceRecord) -> None:
    """Print one record; those of start-up belong to no request."""
    if record.request_id is not None:
        values = {name: round(value, 3) if isinstance(value, float) else value for name, value in record.extras.items()}
        print(f"{record.component:20} {record.event:20} {values}")


def main() -> None:
    llm = LLM(trace=show)
    llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)


if __name__ == "__main__":
    main()
