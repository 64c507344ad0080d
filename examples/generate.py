"""Take engine flags and sampling parameters from the command line: python generate.py --model gpt2 --max-tokens 20."""

from rustvllm import LLM, EngineArgs
from rustvllm.cli.parser import FlexibleArgumentParser


def main() -> None:
    parser = FlexibleArgumentParser(description=__doc__)
    EngineArgs.add_cli_args(parser)
    sampling = parser.add_argument_group("sampling", "Those left out have the model's own defaults.")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    args = vars(parser.parse_args())
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}

    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    for output in llm.generate(["Once upon a time", "The little dog"], params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
