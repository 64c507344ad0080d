"""Print what an engine counted, under the names that a server's /metrics has."""

from rustvllm import LLM, SamplingParams


def main() -> None:
    llm = LLM()
    llm.generate(["Once upon a time"] * 4, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value:
            print(f"{metric.name} {value:g}")


if __name__ == "__main__":
    main()
