"""Gemma 3 with images, whose tokens see each other: no chunk ends within one, and all is as in transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vision_checkpoints
from rustvllm import LLM, SamplingParams
from rustvllm.exceptions import ConfigError, InvalidRequestError, ModelLoadError
from vision_checkpoints import FAKE, IMAGE, WHOLE, greedy, picture, processor_of

pytest.importorskip("PIL", reason="images need Pillow (the extra rustvllm[vision])")
COUNT, PER_IMAGE = 8, 16
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, logprobs=0)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """The folder, transformers' model and its processor."""
    folder = tmp_path_factory.mktemp("gemma3")
    reference = vision_checkpoints.write(folder, "gemma3")
    assert reference.config.text_config.sliding_window < PER_IMAGE, "windows are to be shorter than an image"
    return folder, reference, processor_of(folder)


def start(folder, **options):
    return LLM(str(folder), **({"max_model_len": 200, "num_gpu_blocks_override": 100, "block_size": 4} | options))


def prompt_of(text, *seeds):
    return {"prompt": text, "multi_modal_data": {"image": [picture(seed) for seed in seeds]}}


def check(output, gemma, prompt, atol=1e-4):
    """The output is transformers': the expanded prompt, every id, and the log-probability of each."""
    _, reference, processor = gemma
    images = prompt["multi_modal_data"]["image"]
    count = len(output.outputs[0].token_ids)
    ids, expected, logprobs = greedy(reference, processor, prompt["prompt"], images, count)
    assert list(output.prompt_token_ids) == ids
    assert list(output.outputs[0].token_ids) == expected
    found = [at[token].logprob for at, token in zip(output.outputs[0].logprobs, expected, strict=True)]
    np.testing.assert_allclose(found, logprobs.max(-1).values, atol=atol)


def runner_of(llm):
    return llm.llm_engine.engine_core.core.executor._runner


def record_chunks(llm):
    """Fills a list with the first token and the end of each chunk that runs, and the ends of its request's images."""
    images, chunks = runner_of(llm).images, []
    rows_of_step = images.rows_of_step

    def recorded(output, step):
        starts = step.int32("query_start_loc", output.num_reqs + 1).tolist()
        for index, row in enumerate(step.int32("idx_mapping", output.num_reqs).tolist()):
            first = int(step.arrays["positions"][starts[index]])
            spans = [(int(at.positions[0]), int(at.positions[-1]) + 1) for at in images._images.get(row, [])]
            chunks.append((first, first + starts[index + 1] - starts[index], spans))
        return rows_of_step(output, step)

    images.rows_of_step = recorded
    return chunks


def is_within(place, spans):
    return any(begin < place < end for begin, end in spans)


TEXTS = {
    "alone on a line": ("see\n<image>\nwhat", (1,)),
    "at the beginning": ("<image>what", (2,)),
    "at the end": ("see<image>", (3,)),
    "side by side": ("<image><image>\n", (1, 2)),
    "between line breaks": ("a\n\n\n<image>\n\n\n\n\n<image>\n\n", (4, 1)),
    "two, and text": ("see <image> and <image> what", (1, 5)),
    "none": ("no image", ()),
}


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_texts_around_images(gemma, backend):
    """Blank lines around an image become one token with the line breaks that they meet, as in transformers."""
    llm = start(gemma[0], attention_backend=backend)
    prompts = [prompt_of(text, *seeds) for text, seeds in TEXTS.values()]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert runner_of(llm).backend.name == ("cpu" if backend == "auto" else "torch")
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, gemma, prompt)
    tokenizer = llm.get_tokenizer()
    ids = [
        {**prompt, "prompt_token_ids": tokenizer.encode(prompt["prompt"], add_special_tokens=False)}
        for prompt in prompts
    ]
    again = llm.generate([{k: v for k, v in each.items() if k != "prompt"} for each in ids], GREEDY, use_tqdm=False)
    assert [each.prompt_token_ids for each in again] == [each.prompt_token_ids for each in outputs]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_chunks_end_before_an_image_and_not_within(gemma, backend):
    llm = start(gemma[0], max_num_batched_tokens=18, max_num_seqs=4, attention_backend=backend)
    chunks = record_chunks(llm)
    prompts = [prompt_of("see <image> and <image> what", 1, 2), prompt_of("a text alone"), prompt_of("<image>", 3)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, gemma, prompt)
    before = [end for _, end, spans in chunks if any(begin == end for begin, _ in spans)]
    assert len(before) >= 2, "no chunk ended where an image begins"
    assert not any(is_within(end, spans) for _, end, spans in chunks)


@pytest.mark.parametrize("swap", [False, True])
def test_preempted_in_the_middle(gemma, swap):
    options = {"preemption_mode": "swap", "swap_space": 0.1} if swap else {}
    llm = start(
        gemma[0], num_gpu_blocks_override=26, max_model_len=80, max_num_batched_tokens=20, max_num_seqs=4, **options
    )
    chunks = record_chunks(llm)
    prompts = [prompt_of("see <image> and <image> what", seed, 7) for seed in (1, 2, 3)] + [prompt_of("text")]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    stats = llm.llm_engine.engine_core.handle.stats()
    assert stats["num_preemptions"] > 0
    assert (stats["num_swapped_in"] > 0) == swap
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, gemma, prompt)
    assert not any(is_within(end, spans) for _, end, spans in chunks)


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "int8_per_token_head"])
def test_a_prefix_that_ends_within_an_image(gemma, cache):
    """Its last blocks have been given to others: the rest of the image sees the keys of its beginning."""
    llm = start(gemma[0], num_gpu_blocks_override=24, max_model_len=84, kv_cache_dtype=cache)
    chunks, prompt = record_chunks(llm), prompt_of("see it: <image>\nwhat", 1)
    [first] = llm.generate(prompt, GREEDY, use_tqdm=False)
    found = 0
    for length in range(44, 76, 4):
        llm.generate("x" * length, SamplingParams(max_tokens=1), use_tqdm=False)
        del chunks[:]
        [again] = llm.generate(prompt, GREEDY, use_tqdm=False)
        found += is_within(chunks[0][0], chunks[0][2])
        assert chunks[0][0] == again.num_cached_tokens
        if cache == "auto":
            check(again, gemma, prompt)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        values = [[row[token].logprob for row, token in zip(each.logprobs, each.token_ids, strict=True)]
                  for each in (first.outputs[0], again.outputs[0])]  # fmt: skip
        np.testing.assert_allclose(values[0], values[1], atol=1e-4)
    assert found > 0, "no prefix ended within the image"


@pytest.mark.parametrize("cache", ["bfloat16", "int8_per_token_head"])
def test_caches_in_fewer_bits(gemma, cache):
    """Not equal to transformers, but near; and different from a mask that lets nothing see what follows."""
    llm = start(gemma[0], kv_cache_dtype=cache, max_num_batched_tokens=20, max_num_seqs=4)
    prompts = [prompt_of("see <image> and <image> what", 1, 2), prompt_of("see <image>", 3)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    _, reference, processor = gemma
    for output, prompt in zip(outputs, prompts, strict=True):
        _, _, logprobs = greedy(reference, processor, prompt["prompt"], prompt["multi_modal_data"]["image"], 1)
        first = output.outputs[0].token_ids[0]
        found = output.outputs[0].logprobs[0][first].logprob
        assert abs(found - logprobs[0, first]) < 0.1


def test_tokens_of_an_image_see_each_other(gemma):
    """What is tested matters: the same prompt, each token of which sees only what is before it, has other answers."""
    llm = start(gemma[0])
    prompt = prompt_of("see <image> what", 1)
    [right] = llm.generate(prompt, GREEDY, use_tqdm=False)
    check(right, gemma, prompt)
    blind = start(gemma[0])
    runner = runner_of(blind)
    runner._visible = lambda output, step: None
    [wrong] = blind.generate(prompt, GREEDY, use_tqdm=False)
    token = right.outputs[0].token_ids[0]
    assert (
        wrong.outputs[0].token_ids[0] != token
        or abs(wrong.outputs[0].logprobs[0][token].logprob - right.outputs[0].logprobs[0][token].logprob) > 1e-3
    )


@pytest.mark.parametrize("layout", ["published", "newest"])
def test_layouts_of_a_checkpoint(gemma, tmp_path, layout):
    """What is on the hub: a tower without a head, a ``config.json`` without what is the default; and newer names."""
    folder, reference, processor = gemma
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    stored = load_file(folder / "model.safetensors")
    assert "language_model.model.norm.weight" in stored
    assert "vision_tower.post_layernorm.weight" in stored
    if layout == "newest":
        names = {name: f"model.{name}".replace("language_model.model.", "language_model.") for name in stored}
    else:
        names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in stored}
    kept = {new: stored[name] for name, new in names.items() if not name.startswith("vision_tower.head.")}
    assert len(kept) < len(stored)
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["vision_use_head"] = False
    del config["text_config"]["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").unlink()
    described = {**vision_checkpoints.GEMMA_PROCESSOR, "image_processor_type": "Gemma3ImageProcessorFast"}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": described}))
    prompt = prompt_of("see <image> what", 3)
    check(start(tmp_path).generate(prompt, GREEDY, use_tqdm=False)[0], (tmp_path, reference, processor), prompt)


def changed(gemma, tmp_path, config=None, processor=None):
    """The checkpoint with other descriptions."""
    for file in gemma[0].iterdir():
        shutil.copy(file, tmp_path)
    for name, changes in (("config.json", config), ("preprocessor_config.json", processor)):
        values = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**values, **(changes or {})}))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "processor", "match"),
    [
        ({}, {"do_pan_and_scan": True}, "do_pan_and_scan is not supported yet: set it to false"),
        ({}, {"size": {"height": 64, "width": 32}}, "images become 64 pixels .* image_size of 32"),
        ({}, {"image_seq_length": 256}, "image_seq_length is 256, but mm_tokens_per_image of config.json is 16"),
        ({}, {"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor'; for Gemma3.* Gemma3ImageProcessor"),
        ({"mm_tokens_per_image": 15}, {}, "mm_tokens_per_image is 15, but 8 x 8 patches"),
        ({"mm_tokens_per_image": 9}, {}, "mm_tokens_per_image is 9, but 8 x 8 patches"),
        ({"image_token_index": 320}, {}, "id 320, which is not in the vocabulary"),
        ({"boi_token_index": None}, {}, "id 255999, which is not in the vocabulary"),
    ],
)
def test_descriptions_that_do_not_fit(gemma, tmp_path, config, processor, match):
    with pytest.raises(ModelLoadError, match=match):
        start(changed(gemma, tmp_path, config, processor))


def test_what_is_refused(gemma):
    folder, *_ = gemma
    for options, match in [
        (
            {"max_num_batched_tokens": 15, "max_num_seqs": 4},
            "16 tokens of an image in one step, but max_num_batched_to",
        ),
        (
            {"long_prefill_token_threshold": 15},
            "16 tokens of an image in one step, but long_prefill_token_threshold is 15",
        ),
        ({"mm_processor_kwargs": {"do_pan_and_scan": True}}, "mm_processor_kwargs may have .* got 'do_pan_and_scan'"),
        ({"mm_processor_kwargs": {"max_pixels": 100}}, "does not see images in their own shape"),
    ]:
        with pytest.raises(ConfigError, match=match):
            start(folder, **options)
    llm = start(folder)
    refused = [("no mark", (1,), "0 image placeholders"), (IMAGE * 2, (1,), "2 image placeholders"),
               (FAKE * PER_IMAGE, (1,), "0 image placeholders")]  # fmt: skip
    for text, seeds, match in refused:
        with pytest.raises(InvalidRequestError, match=match):
            llm.generate(prompt_of(text, *seeds), GREEDY, use_tqdm=False)
    # What a user types is text, also within a prompt that has an image.
    for text in (IMAGE, FAKE * 3 + WHOLE, IMAGE + FAKE):
        llm.generate(text, SamplingParams(max_tokens=2), use_tqdm=False)
    [output] = llm.generate(prompt_of(f"{FAKE}{FAKE} {IMAGE}{FAKE} what", 1), GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == COUNT


@pytest.mark.parametrize("options", [{"limit_mm_per_prompt": {"image": 0}}, {"enable_lora": True}, None])
def test_text_is_served_where_images_cannot_be(gemma, tmp_path, options):
    """As before: with adapters, and from folders that do not describe images."""
    folder = gemma[0]
    if options is None:
        folder = changed(gemma, tmp_path)
        (folder / "preprocessor_config.json").unlink()
        with pytest.raises(
            ConfigError, match=r"allows 2 images, but .* sees none here: .* no preprocessor_config.json"
        ):
            start(folder, limit_mm_per_prompt={"image": 2})
    llm = start(folder, max_num_batched_tokens=8, max_num_seqs=4, **(options or {}))
    assert llm.llm_engine.config.model.vision is None
    check(llm.generate(prompt_of("no image"), GREEDY, use_tqdm=False)[0], gemma, prompt_of("no image"))
    with pytest.raises(InvalidRequestError, match=r"comes with 1 images, but .* sees none"):
        llm.generate(prompt_of(IMAGE, 1), GREEDY, use_tqdm=False)


def test_bfloat16(gemma):
    """Weights, tower and cache in bfloat16: near transformers in float32."""
    llm = start(gemma[0], dtype="bfloat16", max_num_batched_tokens=20, max_num_seqs=4)
    assert next(runner_of(llm).images._tower.parameters()).dtype == torch.bfloat16
    prompt = prompt_of("see <image> and <image> what", 1, 2)
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    _, reference, processor = gemma
    _, _, logprobs = greedy(reference, processor, prompt["prompt"], prompt["multi_modal_data"]["image"], 1)
    first = output.outputs[0].token_ids[0]
    assert abs(output.outputs[0].logprobs[0][first].logprob - logprobs[0, first]) < 0.3
