"""Tiny random models that see images, made with transformers, and transformers' answers to compare with."""

import json
import struct
import zlib

import numpy as np
import torch

IMAGE, FAKE, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
TEXT = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>{% endif %}"
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 28}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 28, "width": 28}, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": MEAN, "image_std": STD, "do_convert_rgb": True,
}  # fmt: skip
SMOLVLM_PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor", "do_resize": True, "size": {"longest_edge": 64}, "resample": 1,
    "do_image_splitting": True, "max_image_size": {"longest_edge": 32}, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True, "do_pad": True,
}  # fmt: skip
QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "do_resize": True, "resample": 3, "patch_size": 4, "merge_size": 2,
    "temporal_patch_size": 2, "size": {"shortest_edge": 640, "longest_edge": 1600}, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": MEAN, "image_std": STD, "do_convert_rgb": True,
}  # fmt: skip
GEMMA_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor", "do_resize": True, "size": {"height": 32, "width": 32},
    "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "do_convert_rgb": None, "do_pan_and_scan": None, "image_seq_length": 16,
}  # fmt: skip
PATCHES = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TOWERS = {
    "qwen2-vl": {**PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2.5-vl": {
        **PATCHES, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3-vl": {
        **PATCHES, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    },
}  # fmt: skip
GRIDS = tuple(QWEN_TOWERS)
KINDS = ("llava", "llava-mistral", "llava-siglip", "idefics3", "smolvlm", *GRIDS, "gemma3")


def write(folder, kind, *, seed=0):
    """Write a checkpoint of a kind; returns transformers' model, in float32."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokens = _write_tokenizer(folder, merges_line_breaks=kind == "gemma3")
    if kind.startswith("llava"):
        tower = {**TOWER, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 16}
        text = {**TEXT, "model_type": "llama"}
        how = {"vision_feature_select_strategy": "default", "vision_feature_layer": -2}
        processor = dict(CLIP_PROCESSOR)
        if kind == "llava-siglip":
            tower = {**TOWER, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7}
            how = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
            processor = {
                **processor,
                "image_processor_type": "SiglipImageProcessor",
                "size": {"height": 28, "width": 28},
            }
            processor = {name: value for name, value in processor.items() if "crop" not in name}
        if kind == "llava-mistral":
            text |= {"model_type": "mistral", "sliding_window": 40}
        config = transformers.LlavaConfig(text_config=text, vision_config=tower, image_token_index=tokens[IMAGE], **how)
        model = transformers.LlavaForConditionalGeneration(config)
    elif kind in GRIDS:
        name = {"qwen2-vl": "Qwen2VL", "qwen2.5-vl": "Qwen2_5_VL", "qwen3-vl": "Qwen3VL"}[kind]
        rotary = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
        config = getattr(transformers, f"{name}Config")(
            text_config={**TEXT, "rope_parameters": rotary, "head_dim": 8}, vision_config=QWEN_TOWERS[kind],
            image_token_id=tokens[IMAGE], vision_start_token_id=tokens[FAKE], vision_end_token_id=tokens[WHOLE],
            video_token_id=319, tie_word_embeddings=kind == "qwen2.5-vl",
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        processor = dict(QWEN_PROCESSOR)
    elif kind == "gemma3":
        text = {
            **TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }  # fmt: skip
        tower = {**TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 4}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=tower, mm_tokens_per_image=16, boi_token_index=tokens[IMAGE],
            image_token_index=tokens[FAKE], eoi_token_index=tokens[WHOLE], pad_token_id=0,
        )  # fmt: skip
        model = transformers.Gemma3ForConditionalGeneration(config)
        processor = dict(GEMMA_PROCESSOR)
    else:
        name = "SmolVLM" if kind == "smolvlm" else "Idefics3"
        tower = {**TOWER, "image_size": 32, "patch_size": 4}
        text = {**TEXT, "model_type": "llama", "tie_word_embeddings": kind == "idefics3"}
        config = getattr(transformers, f"{name}Config")(
            text_config=text, vision_config=tower, image_token_id=tokens[IMAGE], scale_factor=4,
            tie_word_embeddings=kind == "idefics3", pad_token_id=0,
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        processor = {**SMOLVLM_PROCESSOR, "image_processor_type": f"{name}ImageProcessor"}
    torch.manual_seed(seed)
    _scale_weights(model)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model.eval()


@torch.no_grad()
def _scale_weights(model):
    """So large that greedy output is diverse and depends on the image."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.normal_(std=0.1).add_(0.0 if name.endswith("bias") else 1.0)
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.normal_(std=0.1)
        else:
            is_projector = any(part in name for part in ("multi_modal_projector", "connector", "merger"))
            parameter.normal_(std=(0.75 if is_projector else 1.6) * parameter[0].numel() ** -0.5)


def _write_tokenizer(folder, *, merges_line_breaks=False):
    """Bytes and the marks of images, and up to four line breaks as one token; returns the ids of the marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u010a", "\u010a"), ("\u010a\u010a", "\u010a"), ("\u010a\u010a", "\u010a\u010a")]
    merges = merges if merges_line_breaks else []
    tokens = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [IMAGE, FAKE, WHOLE, *(f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4))]
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return {mark: tokenizer.token_to_id(mark) for mark in marks}


def picture(seed, size=(40, 30)):
    """A random image in RGB with coarse spots, which resizing does not even out."""
    from PIL import Image

    spots = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(spots).resize(size, Image.Resampling.BILINEAR)


def processor_of(folder):
    """transformers' processor of text and images."""
    import transformers

    described = json.loads((folder / "preprocessor_config.json").read_text())
    name = described["image_processor_type"]
    processor = getattr(transformers, f"{name}Pil")(
        **{k: v for k, v in described.items() if k != "image_processor_type"}
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "gemma3":
        marks = {"boi_token": IMAGE, "image_token": FAKE, "eoi_token": WHOLE}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=marks
        )
        return transformers.Gemma3Processor(processor, tokenizer, image_seq_length=config["mm_tokens_per_image"])
    tower = config["vision_config"]
    if "Qwen" in name:
        return GridProcessor(processor, tokenizer)
    per_side = tower["image_size"] // tower["patch_size"]
    if config["model_type"] == "llava":
        is_clip = tower["model_type"] == "clip_vision_model"
        return transformers.LlavaProcessor(
            processor, tokenizer, patch_size=tower["patch_size"], num_additional_image_tokens=int(is_clip),
            vision_feature_select_strategy=config["vision_feature_select_strategy"],
        )  # fmt: skip
    return transformers.Idefics3Processor(processor, tokenizer, image_seq_len=(per_side // config["scale_factor"]) ** 2)


class GridProcessor:
    """transformers' image processor of Qwen-VL, and the tokens of its grids (its own class needs videos, too)."""

    def __init__(self, processor, tokenizer):
        self.processor, self.tokenizer = processor, tokenizer

    def __call__(self, text, images, return_tensors):
        inputs = dict(self.processor(images, return_tensors=return_tensors)) if images else {}
        mark = self.tokenizer.convert_tokens_to_ids(IMAGE)
        ids = []
        grids = iter(inputs.get("image_grid_thw", []))
        for token in self.tokenizer(text)["input_ids"]:
            ids += [token] * (int(next(grids).prod()) // 4 if images and token == mark else 1)
        ids = torch.tensor([ids])
        return {**inputs, "input_ids": ids, "mm_token_type_ids": (ids == mark).int() * bool(images)}


@torch.no_grad()
def greedy(model, processor, text, images, count):
    """transformers' greedy ids after a prompt, and the log-probabilities of each step, ``[count, vocab_size]``."""
    inputs = processor(text=text, images=images or None, return_tensors="pt")
    prompt = torch.as_tensor(inputs["input_ids"]).view(1, -1)
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    pixels = {name: inputs[name] for name in names if name in inputs}
    kinds = {name: inputs[name] for name in ("mm_token_type_ids",) if "image_grid_thw" in inputs}
    # Which tokens see those behind them, too.
    blocks = inputs["token_type_ids"] if images and model.config.model_type == "gemma3" else None
    kinds |= {} if blocks is None else {"token_type_ids": blocks}
    ids, logprobs, rows, positions, between = prompt, [], None, None, []
    if hasattr(model.model, "get_rope_index"):
        grids = inputs.get("image_grid_thw")
        positions, _ = model.model.get_rope_index(prompt, inputs["mm_token_type_ids"], image_grid_thw=grids)
        assert (positions[1] != positions[2]).any() == bool(images), "the tokens of an image are not in a grid"
    if images:
        found = model.model.get_image_features(**pixels)
        rows = torch.cat([*found.pooler_output])
        between = [torch.cat([*level]) for level in getattr(found, "deepstack_features", None) or ()]
    for step in range(count):
        embeddings = model.get_input_embeddings()(ids)
        if rows is not None:  # the placeholder may also be generated, and is a token like any other then
            embeddings[0, : prompt.shape[1]][prompt[0] == model.config.image_token_id] = rows
        own = {} if positions is None else {"position_ids": positions}
        if blocks is not None:
            own["token_type_ids"] = torch.cat([blocks, blocks.new_zeros(1, step)], dim=1)
        if between:
            is_image = torch.zeros_like(ids, dtype=torch.bool)
            is_image[0, : prompt.shape[1]] = prompt[0] == model.config.image_token_id
            text = model.model.language_model(
                inputs_embeds=embeddings, visual_pos_masks=is_image, deepstack_visual_embeds=between, **own
            )
            logits = model.lm_head(text.last_hidden_state)[0, -1].float()
        else:
            logits = model(inputs_embeds=embeddings, **own).logits[0, -1].float()
        if positions is not None:  # the next token is one further than any before it
            positions = torch.cat([positions, positions.max().expand(3, 1, 1) + 1], dim=-1)
        if step == 0:
            whole = model(input_ids=prompt, **pixels, **kinds).logits[0, -1].float()
            torch.testing.assert_close(whole, logits, atol=1e-4, rtol=0)
        logprobs.append(logits.log_softmax(-1))
        ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
    return prompt[0].tolist(), ids[0, -count:].tolist(), torch.stack(logprobs)


def empty_png(width, height):
    """A PNG that claims a size and has no pixels."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
