"""A tiny model that transcribes recordings, with a tokenizer and a feature extractor, and sine sweeps to hear."""

import json
import wave
from pathlib import Path

import numpy as np
import torch
from encoders import tokenizer
from model_families import tiny_model
from transformers import (
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    WhisperFeatureExtractor,
)

RATE = 16000
TEXTS = ["w5 w6 w7", "w8 w9 w10", "w11 w12 w13 w14 w15", "w16", "w17 w18 w19 w20 w21", "w22 w23 w24"]
"""Transcripts of 3, 3, 5, 1, 5 and 3 words; the tokenizer puts a token before and one after them."""


def extractor(**changes):
    """Makes 8 bins and 24 frames of a second, as the model of the family whisper reads them."""
    return WhisperFeatureExtractor(**{"feature_size": 8, "chunk_length": 1, "hop_length": 666, **changes})


def write_model(folder, **changes):
    """Write a model whose decoder starts with the token before a text, and return its folder as text."""
    tiny_model("whisper", **{"decoder_start_token_id": 2, "eos_token_id": 3, **changes}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    extractor().save_pretrained(folder)
    return str(folder)


def speech_to_text():
    """Features [frames, bins] of several lengths."""
    sizes = {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 60, "max_target_positions": 32}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32}
    model = Speech2TextForConditionalGeneration(Speech2TextConfig(**sizes, vocab_size=64, decoder_start_token_id=2))
    return model, [torch.randn(40 + 4 * (i % 2), 8) for i in range(6)]


def moonshine():
    """Samples of sound, of several lengths."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64}
    sizes |= {f"{part}_num_hidden_layers": 1 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_num_attention_heads": 4 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_num_key_value_heads": 4 for part in ("encoder", "decoder")}
    model = MoonshineForConditionalGeneration(MoonshineConfig(**sizes, decoder_start_token_id=2, pad_token_id=0))
    return model, [torch.randn(4000 + 400 * (i % 2)) for i in range(6)]


def sweep(seconds=0.5, rate=RATE, first=200.0, last=2000.0):
    """Samples of a sine whose frequency grows from the first to the last, in Hz."""
    time = np.arange(round(seconds * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * (first * time + (last - first) / (2 * seconds) * time**2))


def write_wave(path, samples, rate=RATE, width=2):
    """Write samples, [samples] or [samples, channels], as little-endian integers of `width` bytes."""
    channels = samples[:, None] if samples.ndim == 1 else samples
    if width == 1:
        data = np.round(channels * 128 + 128).clip(0, 255).astype(np.uint8).tobytes()
    else:
        whole = np.round(channels * 2.0 ** (8 * width - 1)).astype("<i8")
        data = np.ascontiguousarray(whole.view(np.uint8).reshape(*whole.shape, 8)[..., :width]).tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)


def write_recordings(folder, texts=TEXTS):
    """Write a sweep for each transcript and the list of all, and return the path of the list as text."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, text in enumerate(texts):
        write_wave(folder / f"{i}.wav", sweep(0.3 + 0.1 * i, first=200.0 * (i + 1), last=4000.0))
        lines.append(json.dumps({"audio": f"{i}.wav", "text": text}))
    (folder / "list.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(folder / "list.jsonl")
