"""What a folder says of images: read, or refused with the file and the value."""

import json

import pytest

from rustvllm import EngineArgs
from rustvllm.config.architectures import text_config
from rustvllm.config.vision import GRID, SINGLE, TILED, VisionConfig
from rustvllm.config.vision.folder import read_vision
from rustvllm.exceptions import ConfigError, ModelLoadError

TEXT = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": 97,
        "num_attention_heads": 4, "max_position_embeddings": 128}  # fmt: skip
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 90,
    "text_config": TEXT, "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}  # fmt: skip
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336}}  # fmt: skip
SMOLVLM = {
    "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "image_token_id": 91,
    "scale_factor": 4, "text_config": TEXT, "vision_config": {"image_size": 512, "patch_size": 16},
}  # fmt: skip
SMOL = {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512}}  # fmt: skip


QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": 92,
    "vision_start_token_id": 90, "vision_end_token_id": 91, "vision_config": {"depth": 2, "patch_size": 14},
    **{name: value for name, value in TEXT.items() if name != "model_type"},
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}  # fmt: skip
GRIDS = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12_845_056,
         "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}  # fmt: skip


def read(folder, config, processor, limits=None, file="preprocessor_config.json", **options):
    if processor is not None:
        (folder / file).write_text(json.dumps(processor))
    return read_vision(folder, config, config["architectures"][0], folder / "config.json", limits, **options)


def test_llava(tmp_path):
    vision = read(tmp_path, LLAVA, CLIP)
    assert (vision.kind, vision.image_token_id, vision.tokens_per_tile) == (SINGLE, 90, 576)
    assert (vision.tile_size, vision.shortest_edge, vision.resample, vision.max_images) == (336, 336, 3, 4)
    assert vision.image_mean[0] == pytest.approx(0.48145466), "CLIP's own"
    assert vision.max_image_bytes == 16 + 3 * 336 * 336
    older = {**CLIP, "size": 336, "crop_size": 336, "feature_extractor_type": "CLIPFeatureExtractor"}
    del older["image_processor_type"]
    assert read(tmp_path, LLAVA, older) == vision
    full = {**LLAVA, "vision_feature_select_strategy": "full"}
    assert read(tmp_path, full, CLIP).tokens_per_tile == 577


def test_smolvlm(tmp_path):
    vision = read(tmp_path, SMOLVLM, SMOL, {"image": 2, "video": 0})
    assert (vision.kind, vision.image_token_id, vision.tokens_per_tile) == (TILED, 91, 64)
    assert (vision.max_tiles, vision.splits, vision.resample, vision.max_images) == (17, True, 1, 2)
    assert read(tmp_path, SMOLVLM, {**SMOL, "do_image_splitting": False}).max_tiles == 1
    for name in ("SmolVLMImageProcessorFast", "SmolVLMImageProcessorPil", "Idefics3ImageProcessor"):
        assert read(tmp_path, SMOLVLM, {**SMOL, "image_processor_type": name}).kind == TILED


def test_qwen_vl(tmp_path):
    vision = read(tmp_path, QWEN, GRIDS)
    assert (vision.kind, vision.image_token_id, vision.placeholder_ids) == (GRID, 92, (90, 92, 91))
    assert (vision.tile_size, vision.patch_size, vision.tokens_per_tile, vision.frames) == (28, 14, 1, 2)
    assert (vision.min_pixels, vision.max_pixels, vision.max_tiles) == (3136, 12_845_056, 16_384)
    assert vision.image_mean[0] == pytest.approx(0.48145466), "CLIP's own"
    newer = {name: value for name, value in GRIDS.items() if "pixels" not in name}
    newer["size"] = {"shortest_edge": 3136, "longest_edge": 12_845_056}
    assert read(tmp_path, QWEN, {**newer, "image_processor_type": "Qwen2VLImageProcessorFast"}) == vision
    assert read(tmp_path, QWEN, newer | {"size": {}}).max_pixels == 1280 * 28 * 28, "transformers' own default"
    short = vision.for_length(1000)
    assert (short.max_tokens, short.max_tiles, short.max_image_bytes) == (999, 999, 16 + 999 * 3 * 28 * 28)
    nested = {**QWEN, "text_config": {**TEXT, "model_type": "qwen2_5_vl_text"}}
    assert read(tmp_path, nested, GRIDS) == vision
    three = {**nested, "architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}}
    three["text_config"] = {name: value for name, value in TEXT.items() if name != "model_type"}
    assert read(tmp_path, three, {**GRIDS, "patch_size": 16}).tile_size == 32


def test_the_newer_file(tmp_path):
    found = read(tmp_path, SMOLVLM, {"image_processor": SMOL, "processor_class": "X"}, file="processor_config.json")
    assert found == read(tmp_path, SMOLVLM, SMOL)


@pytest.mark.parametrize(
    ("config", "processor", "match"),
    [
        (LLAVA, None, "has no preprocessor_config.json, which says how images are processed"),
        (LLAVA, [], "preprocessor_config.json must be a JSON object"),
        (
            LLAVA,
            {**CLIP, "image_processor_type": "FrogProcessor"},
            "image_processor_type is 'FrogProcessor'; for Llava",
        ),
        (LLAVA, SMOL, "image_processor_type is 'SmolVLMImageProcessor'; for LlavaForConditionalGeneration rustvllm"),
        (SMOLVLM, CLIP, "image_processor_type is 'CLIPImageProcessor'; for SmolVLM"),
        (LLAVA, {**CLIP, "resample": 6}, "resample must be an integer from 0 to 5, got 6"),
        (LLAVA, {**CLIP, "rescale_factor": float("nan")}, "rescale_factor must be a positive number, got nan"),
        (LLAVA, {**CLIP, "image_std": [1, float("nan"), 1]}, "image_std must be 3 numbers"),
        (LLAVA, {**CLIP, "do_resize": False}, "do_resize must be true, got False"),
        (LLAVA, {**CLIP, "do_pad": True}, "do_pad is not supported yet"),
        (LLAVA, {**CLIP, "image_mean": [1, 2]}, r"image_mean must be 3 numbers, got \[1, 2\]"),
        (LLAVA, {**CLIP, "image_std": [1, 0, 1]}, "image_std must not hold 0"),
        (LLAVA, {**CLIP, "rescale_factor": "x"}, "rescale_factor must be a positive number, got 'x'"),
        (
            LLAVA,
            {**CLIP, "crop_size": 224},
            "images become 224 pixels wide or high, but the vision tower has an image_si",
        ),
        (LLAVA, {**CLIP, "size": {"shortest_edge": 10**6}}, "shortest_edge must be between 336 and 4096, got 1000000"),
        (LLAVA, {**CLIP, "do_center_crop": False}, "size names shortest_edge, so do_center_crop must be true"),
        ({**LLAVA, "text_config": {"model_type": "qwen2"}}, CLIP, "is 'qwen2'; rustvllm supports llama and mistral"),
        ({**LLAVA, "text_config": None}, CLIP, "needs the objects text_config and vision_config"),
        ({**LLAVA, "vision_config": {"model_type": "frog"}}, CLIP, "the vision tower is 'frog'; for Llava"),
        ({**LLAVA, "vision_feature_select_strategy": "x"}, CLIP, "must be 'default' or 'full', got 'x'"),
        ({**LLAVA, "image_token_index": -1}, CLIP, "image_token_index must be an integer of at least 0, got -1"),
        ({**SMOLVLM, "scale_factor": 5}, SMOL, "32 patches per side are not a multiple of scale_factor 5"),
        (SMOLVLM, {**SMOL, "max_image_size": {"longest_edge": 364}}, "images become 364 pixels"),
        (QWEN, CLIP, "image_processor_type is 'CLIPImageProcessor'; for Qwen2_5_VL"),
        (QWEN, {**GRIDS, "patch_size": 16}, "patch_size is 16, but the vision_config of config.json says 14"),
        (QWEN, {**GRIDS, "merge_size": 1}, "merge_size is 1, but the vision_config of config.json says 2"),
        (QWEN, {**GRIDS, "min_pixels": 0}, "min_pixels must be an integer of at least 1, got 0"),
        (QWEN, {**GRIDS, "max_pixels": 500}, "max_pixels 500, which must be at least 784, a tile of 28 x 28 pixels"),
        (QWEN, {**GRIDS, "min_pixels": 10**7, "max_pixels": 10**6}, "min_pixels 10000000 must be at most max_pixels"),
        (
            {**QWEN, "text_config": TEXT},
            GRIDS,
            "of Qwen2_5_VLForConditionalGeneration is 'llama'; rustvllm supports qwen2_5",
        ),
        (
            {**SMOLVLM, "vision_config": {"image_size": 500, "patch_size": 16}},
            SMOL,
            "500 .* not a multiple of patch_size",
        ),
    ],
)
def test_what_is_refused(config, processor, match, tmp_path):
    with pytest.raises(ModelLoadError, match=match) as caught:
        read(tmp_path, config, processor)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "match"),
    [
        ([4], "must be an object such as"),
        ({"image": -1}, "of 'image' must be 0 or a positive integer, got -1"),
        ({"image": True}, "of 'image' must be 0 or a positive integer"),
        ({"audio": 1}, "allows 'audio', but prompts can hold images only"),
        ({"image": {"count": 1, "width": 9}}, "takes numbers of images and no sizes"),
        ({"image": 100}, "allows 100 images of up to 13369360 bytes, but .* allow at most 20 images"),
    ],
)
def test_limits_that_are_refused(limits, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        read(tmp_path, SMOLVLM, SMOL, limits)
    assert read(tmp_path, SMOLVLM, SMOL, {"image": {"count": 3}}).max_images == 3


def test_limits_of_pixels(tmp_path):
    vision = read(tmp_path, QWEN, GRIDS, sizes={"max_pixels": 100_000})
    assert (vision.min_pixels, vision.max_pixels) == (3136, 100_000)
    newer = {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}
    assert read(tmp_path, QWEN, newer, sizes={"max_pixels": 100_000, "min_pixels": 800}).min_pixels == 800
    for sizes, match in [
        (
            {"max_pixels": 3000},
            "mm_processor_kwargs: min_pixels 3136 must be at most max_pixels 3000, .*; min_pixels is what .* says: set",
        ),
        ({"min_pixels": 1, "max_pixels": 783}, "kwargs: min_pixels 1 .* 783, which must be at least 784, .* pixels$"),
        ({"num_crops": 4}, "may have min_pixels and max_pixels, got 'num_crops'"),
        ({"max_pixels": "9"}, "max_pixels of mm_processor_kwargs must be"),
        ({"max_pixels": 0}, "max_pixels of mm_processor_kwargs must be"),
        ({"max_pixels": 2**31}, "max_pixels of mm_processor_kwargs must be"),
        ([9], "must be an object such as"),
    ]:
        with pytest.raises(ConfigError, match=match):
            read(tmp_path, QWEN, GRIDS, sizes=sizes)
    with pytest.raises(ConfigError, match="has max_pixels, but SmolVLMForConditionalGeneration does not see images in"):
        read(tmp_path, SMOLVLM, SMOL, sizes={"max_pixels": 9000})
    assert read(tmp_path, SMOLVLM, SMOL, sizes={}).kind == TILED


def test_text_models_allow_none(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"]}
    assert read(tmp_path, config, None, {"image": 0}) is None
    with pytest.raises(ConfigError, match="allows 1 images, but LlamaForCausalLM sees none here"):
        read(tmp_path, config, None, {"image": 1})


def test_the_flat_configuration():
    flat = text_config({**LLAVA, "hidden_size": 7, "tie_word_embeddings": True})
    assert (flat["hidden_size"], flat["num_hidden_layers"], flat["tie_word_embeddings"]) == (32, 2, True)
    assert (flat["architectures"], flat["model_type"]) == (LLAVA["architectures"], "llava")
    assert flat["vision_config"] == LLAVA["vision_config"]
    bare = text_config({**LLAVA, "text_config": {"vocab_size": 32_064}})
    assert (bare["hidden_size"], bare["num_hidden_layers"], bare["vocab_size"]) == (4096, 32, 32_064)


def test_the_flat_configuration_of_qwen_vl():
    flat = text_config({**QWEN, "tie_word_embeddings": True})
    assert (flat["hidden_size"], flat["num_hidden_layers"], flat["tie_word_embeddings"]) == (32, 2, True)
    assert flat["rope_scaling"] == {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]}
    assert flat["vision_config"] == QWEN["vision_config"]
    assert flat["text_config"]["num_hidden_layers"] == 2
    assert "vision_config" not in flat["text_config"]
    bare = text_config({**QWEN, "text_config": {"model_type": "qwen2_5_vl_text", "vocab_size": 7}, "hidden_size": 64})
    assert (bare["hidden_size"], bare["rms_norm_eps"], bare["vocab_size"]) == (64, 1e-5, 7)
    assert bare["rope_theta"] == 1_000_000.0


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CLIP))
    return tmp_path


def test_a_token_of_images_that_is_not_in_the_vocabulary_is_refused(folder):
    vocab_size = 90
    (folder / "config.json").write_text(
        json.dumps(LLAVA | {"image_token_index": vocab_size, "text_config": LLAVA["text_config"] | {"vocab_size": 90}})
    )
    args = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu")
    with pytest.raises(ModelLoadError, match=r"token of images has the id 90, which is not in the vocabulary \(0"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: set it to 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: set it to 1"),
        ({"enable_lora": True}, "enable_lora: leave it out"),
    ],
)
def test_combinations_that_are_refused(options, match, folder):
    args = {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    assert isinstance(EngineArgs(**args).create_engine_config().model.vision, VisionConfig)
    with pytest.raises(ConfigError, match=f"sees images, which cannot be combined with {match}"):
        EngineArgs(**args, **options).create_engine_config()
