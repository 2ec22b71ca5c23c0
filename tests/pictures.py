"""A tiny vision-language model with its processor, and pictures of noise to see."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from encoders import tokenizer
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaProcessor

IMAGE, PLACEHOLDERS = 60, 4
GROUPED = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
TEXTS = ["w5 w6 w7", "w8 w9 w10 w11", "w12 w13 w14", "w15 w16"]


def llava():
    """Pictures of 16 x 16 in 2 x 2 patches."""
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**GROUPED),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8),
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def write_model(folder):
    """Write the model, and return its folder as text."""
    llava().save_pretrained(folder)
    words = tokenizer(IMAGE)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    more = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(CLIPImageProcessorPil(**size), words, **more).save_pretrained(folder)
    return str(folder)


def write_pictures(folder, texts=TEXTS):
    """Write a picture for each text and the list of all, and return the path of the list as text."""
    folder, draw, lines = Path(folder), np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        Image.fromarray(draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        lines.append(json.dumps({"image": f"{i}.png", "text": text}))
    (folder / "list.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "list.jsonl")
