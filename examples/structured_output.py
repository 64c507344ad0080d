"""Have answers obey a JSON schema, a regular expression or a list of choices, offline."""

import json

from rustvllm import LLM, SamplingParams
from rustvllm.sampling_params import StructuredOutputsParams

PET = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["cat", "dog", "bird"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
QUESTIONS = {
    "choice": ("Is the dog happy?", StructuredOutputsParams(choice=["yes", "no"])),
    "regex": ("The year of the story is", StructuredOutputsParams(regex=r" (19|20)\d\d")),
    "json": ("Describe a pet as JSON:", StructuredOutputsParams(json=PET, disable_any_whitespace=True)),
}


def main() -> None:
    llm = LLM()
    prompts = [prompt for prompt, _ in QUESTIONS.values()]
    params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=each) for _, each in QUESTIONS.values()]
    for kind, output in zip(QUESTIONS, llm.generate(prompts, params), strict=True):
        print(f"{kind}: {output.outputs[0].text!r}")
    pet = json.loads(output.outputs[0].text)
    print(f"a {pet['kind']}")


if __name__ == "__main__":
    main()
