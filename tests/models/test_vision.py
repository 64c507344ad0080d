"""Models that see images, against transformers: greedy ids and log-probabilities, whatever the schedule."""

import base64
import io
import re

import numpy as np
import pytest

import vision_checkpoints
from rustvllm import LLM, SamplingParams
from rustvllm.cli.journey_page import JourneyPage
from rustvllm.exceptions import InvalidRequestError
from rustvllm.observe.trace.journey import RequestJourney
from vision_checkpoints import KINDS, QWEN_PROCESSOR, greedy, picture, processor_of

pytest.importorskip("PIL", reason="images need Pillow (the extra rustvllm[vision])")
COUNT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, logprobs=0)
SIZES = {"none": [], "one": [(40, 30)], "two": [(64, 20), (30, 70)], "as large as a tile": [(28, 28)]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Each kind's folder, transformers' model and its processor, made when first asked for."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, vision_checkpoints.write(folder, kind), processor_of(folder)
        return made[kind]

    return get


def start(folder, **options):
    return LLM(str(folder), **({"max_model_len": 400, "num_gpu_blocks_override": 200} | options))


def prompt_of(images, words="see", end="what"):
    text = f"{words} {' and '.join(['<image>'] * len(images))} {end}"
    return {"prompt": text, "multi_modal_data": {"image": images}}


def check(output, reference, processor, prompt):
    """The output is transformers': the expanded prompt, every id, and the log-probability of each."""
    ids, expected, logprobs = greedy(
        reference, processor, prompt["prompt"], prompt["multi_modal_data"]["image"], len(output.outputs[0].token_ids)
    )
    assert list(output.prompt_token_ids) == ids
    assert list(output.outputs[0].token_ids) == expected
    found = [at[token].logprob for at, token in zip(output.outputs[0].logprobs, expected, strict=True)]
    np.testing.assert_allclose(found, logprobs.max(-1).values, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_transformers(checkpoints, kind):
    folder, reference, processor = checkpoints(kind)
    llm = start(folder)
    prompts = [prompt_of([picture(index, size) for size in sizes]) for index, sizes in enumerate(SIZES.values())]
    for prompt in prompts:
        check(llm.generate(prompt, GREEDY, use_tqdm=False)[0], reference, processor, prompt)


def test_an_older_checkpoint_has_other_names(checkpoints, tmp_path):
    """What transformers 4 wrote: a ``vision_model`` within the tower, and defaults that ``text_config`` leaves out."""
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    folder, reference, processor = checkpoints("llava")
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): each for name, each in stored.items()}
    assert renamed.keys() != stored.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = prompt_of([picture(3)])
    check(start(tmp_path).generate(prompt, GREEDY, use_tqdm=False)[0], reference, processor, prompt)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"enable_prefix_caching": False},
        {"async_scheduling": True, "max_num_batched_tokens": 32, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 24, "block_size": 4, "max_model_len": 80},
        {
            "num_gpu_blocks_override": 24,
            "block_size": 4,
            "max_model_len": 80,
            "preemption_mode": "swap",
            "swap_space": 0.1,
        },
    ],
    ids=["together", "chunks", "no prefix cache", "overlapping steps", "preemption", "swapping"],
)
@pytest.mark.parametrize("kind", ["llava", "smolvlm", "qwen2.5-vl", "qwen3-vl", "gemma3"])
def test_batches(checkpoints, kind, options):
    """Requests with different images and without any run together; chunks end within images, but Gemma 3's."""
    folder, reference, processor = checkpoints(kind)
    llm = start(folder, **options)
    prompts = [
        prompt_of([picture(1)]),
        prompt_of([]),
        prompt_of([picture(2)]),
        prompt_of([picture(1), picture(3, (30, 70))], "look at"),
        prompt_of([picture(2)], "again"),
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, reference, processor, prompt)
    stats = llm.llm_engine.engine_core.handle.stats()
    assert (stats["num_preemptions"] > 0) == ("block_size" in options)
    assert outputs[0].outputs[0].token_ids != outputs[2].outputs[0].token_ids, "the image does not matter"


@pytest.mark.parametrize("quantization", [None, "int8", "int4-g32"])
@pytest.mark.parametrize("kind", ["smolvlm", "qwen2.5-vl", "qwen3-vl", "gemma3"])
def test_one_call_of_the_core(checkpoints, kind, quantization, monkeypatch):
    """The decoder in one call takes the rows of images, with quantised weights too: as module by module."""
    folder, reference, processor = checkpoints(kind)
    monkeypatch.setenv("RUSTVLLM_LINEAR_KERNEL", "core")
    prompts = [prompt_of([picture(1)]), prompt_of([picture(2), picture(3)])]
    outputs = {}
    for decoder in ("core", "modules"):
        monkeypatch.setenv("RUSTVLLM_DECODER", decoder)
        llm = start(folder, quantization=quantization, max_num_batched_tokens=48, max_num_seqs=8)
        model = llm.llm_engine.engine_core.core.executor._runner.model
        outputs[decoder] = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert (model.decoder_kernel is not None and all(model.decoder_kernel.times)) == (decoder == "core")
    for one, other, prompt in zip(*outputs.values(), prompts, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        if quantization is None:
            check(one, reference, processor, prompt)


def num_computed(llm):
    """Images whose features the worker has computed."""
    return llm.llm_engine.engine_core.core.executor._runner.images.num_computed


@pytest.mark.parametrize("kind", ["llava", "smolvlm", "qwen2.5-vl", "gemma3"])
def test_prefixes_are_shared_by_requests_with_the_same_image(checkpoints, kind):
    folder, reference, processor = checkpoints(kind)
    llm = start(folder, block_size=4)
    words = "a long beginning before"
    prompts = [prompt_of([picture(seed)], words) for seed in (1, 1, 2)] + [prompt_of([picture(1)], words, "else")]
    outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, reference, processor, prompt)
    first, again, other, longer = (output.num_cached_tokens for output in outputs)
    ids = list(outputs[0].prompt_token_ids)
    assert first == 0
    assert again == (len(ids) - 1) // 4 * 4
    before = len(words) + (3 if kind == "gemma3" else 1)  # a blank line and the first of the marks around an image
    assert other == before // 4 * 4, "what comes before another image is shared"
    assert longer >= len(ids) - len(" what") - 4
    assert num_computed(llm) == 2, "features were computed again for an image that is known"
    assert outputs[0].outputs[0].token_ids != outputs[2].outputs[0].token_ids


def test_features_are_computed_again_when_they_were_dropped(checkpoints):
    folder, reference, processor = checkpoints("llava")
    llm = start(folder, enable_prefix_caching=False)
    images = llm.llm_engine.engine_core.core.executor._runner.images
    images._cache_bytes = 0
    for expected, seed in enumerate((1, 1, 2), 1):
        prompt = prompt_of([picture(seed)])
        check(llm.generate(prompt, GREEDY, use_tqdm=False)[0], reference, processor, prompt)
        assert images.num_computed == expected
        assert not images._cache
        assert not images._images, "the images of a request that has ended are kept"


@pytest.mark.parametrize("kind", ["smolvlm", "qwen2.5-vl", "gemma3"])
def test_samples_beams_and_prompt_logprobs(checkpoints, kind):
    folder, reference, processor = checkpoints(kind)
    llm = start(folder)
    prompt = prompt_of([picture(5)])
    alone = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    samples = llm.generate(prompt, SamplingParams(top_k=1, n=3, max_tokens=COUNT), use_tqdm=False)[0]
    assert [sample.token_ids for sample in samples.outputs] == [alone] * 3
    one_beam = SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=COUNT)
    beams = llm.generate(prompt, one_beam, use_tqdm=False)[0].outputs
    other = llm.generate(prompt_of([picture(6)]), one_beam, use_tqdm=False)[0].outputs
    assert beams[0].token_ids != other[0].token_ids
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    judged = llm.generate(prompt, asked, use_tqdm=False)[0]
    ids = list(judged.prompt_token_ids)
    import torch

    inputs = processor(text=prompt["prompt"], images=prompt["multi_modal_data"]["image"], return_tensors="pt")
    with torch.no_grad():
        dropped = {"mm_token_type_ids"} if kind == "smolvlm" else set()
        logits = reference(**{name: inputs[name] for name in inputs if name not in dropped}).logits[0]
    expected = logits.float().log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    found = [at[token].logprob for at, token in zip(judged.prompt_logprobs[1:], ids[1:], strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["llava", "qwen2-vl", "gemma3"])
def test_guesses_and_token_ids(checkpoints, kind):
    """Drafts by n-grams change nothing, and a prompt of ids has one id for each image."""
    folder, reference, processor = checkpoints(kind)
    llm = start(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    prompt = prompt_of([picture(7)])
    tokenizer = llm.get_tokenizer()
    by_ids = {**prompt, "prompt_token_ids": tokenizer.encode(prompt["prompt"], add_special_tokens=False)}
    del by_ids["prompt"]
    outputs = llm.generate([prompt, by_ids], GREEDY, use_tqdm=False)
    for output in outputs:
        check(output, reference, processor, prompt)


@pytest.mark.parametrize(
    ("kind", "method"), [("qwen2.5-vl", "ngram"), ("qwen2.5-vl", "suffix"), ("gemma3", "ngram"), ("gemma3", "suffix")]
)
def test_drafts_behind_images(checkpoints, kind, method):
    """Drafts are verified at the positions that the tokens have, which are not their places with Qwen-VL."""
    folder, reference, processor = checkpoints(kind)
    how = {"ngram": {"prompt_lookup_max": 2, "prompt_lookup_min": 1}, "suffix": {}}[method]
    llm = start(folder, speculative_config={"method": method, "num_speculative_tokens": 3, "adaptive": False, **how})
    free = SamplingParams(temperature=0, max_tokens=COUNT, logprobs=0)
    [first] = llm.generate(prompt_of([picture(7)]), free, use_tqdm=False)
    # The same answer is part of the next prompt, so that its tokens are drafted; and an image comes first.
    words = first.outputs[0].text
    prompts = [prompt_of([picture(seed)], f"{words} {words}", end=f"{words} {words}") for seed in (7, 8)]
    sampling = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    # Twice, because suffixes are looked up in answers that have ended, too.
    outputs = [output for _ in range(2) for output in llm.generate(prompts, sampling, use_tqdm=False)]
    stats = llm.llm_engine.engine_core.core.scheduler.stats()
    assert stats["num_draft_tokens"] > 0
    assert method != "suffix" or stats["num_accepted_tokens"] > 0
    for output, prompt in zip(outputs, prompts * 2, strict=True):
        check(output, reference, processor, prompt)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", ["qwen2-vl", "qwen3-vl", "gemma3"])
def test_company_changes_no_bit(checkpoints, kind, quantization, monkeypatch):
    """With batch_invariant: a request alone, and with others in chunks that end within images, has the same bits."""
    folder, *_ = checkpoints(kind)
    monkeypatch.setenv("RUSTVLLM_LINEAR_KERNEL", "core")
    prompts = [prompt_of([picture(1)]), prompt_of([]), prompt_of([picture(2), picture(3, (30, 70))]), prompt_of([])]
    options = {"batch_invariant": True, "quantization": quantization, "enable_prefix_caching": False}
    alone = start(folder, **options)
    expected = [alone.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    together = start(folder, **options, max_num_batched_tokens=16, max_num_seqs=8)
    kernel = together.llm_engine.engine_core.core.executor._runner.model.decoder_kernel
    found = [output.outputs[0] for output in together.generate(prompts, GREEDY, use_tqdm=False)]
    assert kernel is not None
    assert all(kernel.times), "the core did not run the blocks"
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids == other.token_ids
        assert [[at.logprob for at in row.values()] for row in one.logprobs] == [
            [at.logprob for at in row.values()] for row in other.logprobs
        ]


@pytest.mark.parametrize("kind", ["qwen2-vl", "qwen2.5-vl"])
def test_other_layouts_of_a_checkpoint(checkpoints, kind, tmp_path):
    """What is on the hub: no ``text_config`` and a scaling called ``mrope``; and the newest names of tensors."""
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    folder, reference, processor = checkpoints(kind)
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rotary = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": rotary["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rotary["mrope_section"]}
    del flat["vision_config"]["model_type"], flat["vision_config"]["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(flat))
    sizes = QWEN_PROCESSOR["size"]
    older = {**QWEN_PROCESSOR, "min_pixels": sizes["shortest_edge"], "max_pixels": sizes["longest_edge"]}
    del older["size"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    stored = load_file(folder / "model.safetensors")
    newest = {
        name if name.startswith("lm_head.")
        else f"model.{name}" if name.startswith("visual.")
        else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in stored.items()
    }  # fmt: skip
    assert any(name.startswith("model.visual.") for name in newest)
    assert any(name.startswith("model.language_model.layers.") for name in newest)
    save_file(newest, tmp_path / "model.safetensors")
    prompt = prompt_of([picture(3), picture(4, (64, 20))])
    check(start(tmp_path).generate(prompt, GREEDY, use_tqdm=False)[0], reference, processor, prompt)


def test_what_is_refused_of_grids(checkpoints):
    folder, *_ = checkpoints("qwen2.5-vl")
    llm = start(folder, max_model_len=24, num_gpu_blocks_override=8)
    for size, match in [
        ((402, 2), "image 1 has 402 x 2 pixels; the longer side may be at most 200 times the other"),
        ((40, 40), "image 1 has 40 x 40 pixels, which become 25 tokens, but the maximum context length is 24 tokens"),
        ((32, 40), "maximum context length is 24 tokens"),
    ]:
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate(prompt_of([picture(1, size)]), SamplingParams(max_tokens=2), use_tqdm=False)
    small = {"prompt": "<image>.", "multi_modal_data": {"image": picture(1, (32, 40))}}
    assert len(llm.generate(small, SamplingParams(max_tokens=2), use_tqdm=False)[0].prompt_token_ids) == 21


@pytest.mark.parametrize("content_format", ["auto", "string"])
def test_conversations(checkpoints, content_format):
    """Pillow images and URLs in messages; where content is one text, each has a placeholder on a line of its own."""
    folder, reference, processor = checkpoints("smolvlm")
    llm = start(folder)
    images, file = [picture(8), picture(9)], io.BytesIO()
    images[1].save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_pil", "image_pil": images[0]},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what"},
    ]
    conversations = [[{"role": "user", "content": parts}], [{"role": "user", "content": [parts[0], parts[3]]}]]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}" if content_format == "string" else None
    outputs = llm.chat(
        conversations, GREEDY, use_tqdm=False, chat_template_content_format=content_format, chat_template=template
    )
    text = "see\n<image>\n<image>\nwhat" if template else "user:see<image><image>what\nassistant:"
    check(outputs[0], reference, processor, {"prompt": text, "multi_modal_data": {"image": images}})
    text = "see\nwhat" if template else "user:seewhat\nassistant:"
    check(outputs[1], reference, processor, {"prompt": text, "multi_modal_data": {"image": []}})


def test_what_is_refused(checkpoints):
    folder, *_ = checkpoints("llava")
    llm = start(folder, limit_mm_per_prompt={"image": 2})
    image = picture(1)

    def refused(prompt, match, **params):
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate(prompt, SamplingParams(max_tokens=2, **params), use_tqdm=False)

    refused({"prompt": "no mark", "multi_modal_data": {"image": image}}, r"0 image placeholders \(<image>.*with 1 im")
    refused({"prompt": "<image><image>", "multi_modal_data": {"image": image}}, "has 2 image placeholders .* 1 images")
    refused({"prompt": "<image>" * 3, "multi_modal_data": {"image": [image] * 3}}, "with 3 images; the limit is 2")
    refused({"prompt": "<image>", "multi_modal_data": {"image": "a.png"}}, r"must be a PIL.Image.Image, got str")
    closed = picture(2)
    closed.close()
    refused({"prompt": "<image>", "multi_modal_data": {"image": closed}}, "image 1 cannot be decoded: Operation on")
    refused({"prompt": "<image>", "multi_modal_data": {"video": [image]}}, "'video', which is not supported yet")
    refused({"prompt": "<image>", "multi_modal_data": [image]}, "must be a dict such as")
    refused(
        prompt_of([image]), r"_tokens is 5, but the prompt has \d+ tokens, and one with im", truncate_prompt_tokens=5
    )
    refused(prompt_of([image], "x" * 380), "maximum context length is 400 tokens")
    # Without images the mark is a token like any other.
    assert llm.generate("an <image> of words", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


def test_a_journey_shows_the_time_of_the_tower(checkpoints):
    folder, *_ = checkpoints("smolvlm")
    told, lines = [], []
    llm = start(folder, trace=told.append, max_num_batched_tokens=64)
    page = JourneyPage(llm.llm_engine, lines.append, use_color=False)
    parts, pages = [], []
    for prompt in (prompt_of([picture(1), picture(2)]), prompt_of([picture(1)]), prompt_of([])):
        first = len(told)
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        records = RequestJourney.of(output.request_id, told[first:]).records
        ran = [record for record in records if record.event == "ran"]
        assert len(ran) >= 2
        parts.append([record.extras.get("images_us") for record in ran])
        for record in ran:
            in_parts = [record.extras.get(name, 0) for name in ("prepare_us", "images_us", "forward_us")]
            assert min(in_parts) >= 0
            assert sum(in_parts) == pytest.approx(record.duration_ns / 1e3)
        lines.clear()
        page.begin(output.request_id, "see")
        for record in records:
            page.show(record)
        pages.append("\n".join(lines))
    two, again, none = parts
    assert two[0] > 0
    assert two[-1] is None, "a decode computes no image"
    assert again == [None] * len(again), "the features are known"
    assert none == [None] * len(none)
    assert re.search(r"tokens: prepare \d+, images \d+,\s+forward \d+", pages[0]), pages[0]
    assert "images" not in pages[1] + pages[2]


def test_a_text_model_sees_no_images():
    llm = LLM(max_model_len=64, num_gpu_blocks_override=16)
    with pytest.raises(InvalidRequestError, match=r"comes with 1 images, but .* sees none"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": picture(1)}}, use_tqdm=False)
