"""The tiny model's tokenizer, text encoder, denoiser and noise schedule, untrained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

MAX_TOKENS = 24


START, END = "<|startoftext|>", "<|endoftext|>"


def write_tokenizer(folder: Path, words: Iterable[str]) -> Any:
    """Writes the tokenizer's files and returns it loaded."""
    merges = _learn_merges(words)
    base = _byte_symbols()
    tokens = [*base, *(s + "</w>" for s in base), *("".join(pair) for pair in merges), START, END]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": MAX_TOKENS,
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    for word in words:
        if len(tokenizer(word).input_ids) != 3:  # start, the word, end
            raise RuntimeError(f"{word!r} is not one token: {tokenizer.tokenize(word)}")
    return tokenizer


def _byte_symbols() -> list[str]:
    """The printable symbol that stands for each byte, in CLIP's order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(hidden))]


def _learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Joins the most frequent neighbours until each word is one piece."""
    pieces = [[*word[:-1], word[-1] + "</w>"] for word in sorted(words)]
    merges: list[tuple[str, str]] = []
    while True:
        pairs = Counter(pair for word in pieces for pair in pairwise(word))
        if not pairs:
            return merges
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        merges.append(best)
        pieces = [_join(word, best) for word in pieces]


def _join(word: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for piece in word:
        # A piece made here never equals pair[0] again: it is longer than that.
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def build_text_encoder(tokenizer: Any) -> Any:
    """A two-layer CLIP text model for the tokenizer."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        projection_dim=64,
        hidden_act="quick_gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModel(config)
    for name, weight in encoder.named_parameters():
        if "embedding" in name:  # CLIP's own start (0.02) is too weak for so few steps
            nn.init.normal_(weight, std=0.2)
    return encoder


def build_denoiser() -> Any:
    """The UNet: two levels (8x8 and 4x4), both with cross-attention."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=8,
        out_channels=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(64, 88),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=4,  # one channel per group would lose the colours
    )


def build_scheduler() -> Any:
    """Linear betas to 0.02 end in pure noise, so that flat backgrounds come out right."""
    return DDIMScheduler(
        beta_schedule="linear",
        beta_start=1e-4,
        beta_end=0.02,
        prediction_type="v_prediction",
        clip_sample=False,
        timestep_spacing="trailing",
        set_alpha_to_one=True,
        steps_offset=1,
    )
