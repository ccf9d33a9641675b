"""The tiny model's autoencoder: how it is built, started and trained.

It is diffusers' AutoencoderTiny: 64x64 pixels to 8x8x8 numbers.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderTiny
from torch import Tensor, nn

from scripts.lab.tiny_model.shapes import SIDE, Drawing, Rgb, realise, render, sample_spec

CROP = 32
BATCH = 12
NOISE = 0.08  # added to the latents in training, so that the decoder forgives a denoiser's errors


def pictures(drawings: Sequence[Drawing]) -> Tensor:
    """The drawings as a batch (n, 3, side, side) in [-1, 1]."""
    stacked = np.stack([render(drawing) for drawing in drawings])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous() / 127.5 - 1


def build() -> Any:
    """An untrained autoencoder that already passes each block's mean colour through."""
    vae = AutoencoderTiny(
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        num_encoder_blocks=(0, 1, 1, 2),
        num_decoder_blocks=(2, 1, 1, 0),
        latent_channels=8,
        scaling_factor=1.0,
    )
    for name, module in vae.named_modules():
        if isinstance(module, nn.Conv2d):
            _pass_colour(name, module)
    return vae


def _pass_colour(name: str, conv: nn.Conv2d) -> None:
    """Three channels carry the mean colour end to end; the others start at random.

    Training so starts from a blurred picture instead of noise, which saves most of its time.
    """
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    weight = conv.weight.data
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    if ".conv." in name or ".skip" in name:  # inside a residual block: the colours go round it
        if name.endswith("conv.4"):
            weight *= 0.1
            weight[:3] = 0
        return
    weight[:3] = 0
    weight[3:] *= 0.7
    for c in range(3):
        if conv.stride[0] == 2:
            weight[c, c, 1:, 1:] = 0.25
        else:
            weight[c, c, 1, 1] = 1
    if conv.out_channels == 8 and conv.bias is not None:  # into the latents: [0, 1] to [-1, 1]
        weight[:3] *= 2
        conv.bias.data[:3] = -1
    if conv.in_channels == 8 and conv.bias is not None:  # and back
        weight[:3] *= 0.5
        conv.bias.data[:3] = 0.5


def train(steps: int, rng: random.Random, log: Callable[[str], None]) -> Any:
    """A trained autoencoder whose scaling factor makes its latents of unit deviation."""
    vae = build()
    optimiser = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-5, betas=(0.9, 0.99))
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * _rate(step, steps)
        crops = _crops(rng)
        latents = vae.encode(crops).latents
        rebuilt = vae.decode(latents + NOISE * torch.randn_like(latents)).sample
        error = rebuilt - crops
        # Every channel is held near mean 0 and deviation 1: a channel much weaker than the
        # others would drown in the noise of the diffusion and its details with it.
        mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
        spread = mean.square().mean() + (deviation - 1).square().mean()
        loss = error.abs().mean() + error.square().mean() + 5e-3 * spread
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        if step % 250 == 0:
            l1 = error.abs().mean().item()
            log(f"autoencoder step {step} l1 {l1:.4f} spread {spread.item():.3f}")
    vae.eval()
    with torch.no_grad():
        batch = pictures([realise(sample_spec(rng), rng) for _ in range(512)])
        latents = vae.encode(batch).latents
    vae.register_to_config(scaling_factor=1 / latents.std().item())
    log(f"autoencoder done, scaling {vae.config.scaling_factor:.3f}")
    return vae


def polish_decoder(vae: Any, steps: int, rng: random.Random, log: Callable[[str], None]) -> None:
    """Trains the decoder alone on whole pictures in the world's own colours.

    The crops of the first training have more outline and more colours than a picture has;
    this makes flat colours even. The encoder, and so the latents, stay as they are.
    """
    weights = list(vae.decoder.parameters())
    optimiser = torch.optim.AdamW(weights, lr=1.5e-3, weight_decay=1e-5, betas=(0.9, 0.99))
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = 1.5e-3 * _rate(step, steps)
        specs = [sample_spec(rng, with_held_out=True) for _ in range(BATCH)]
        batch = pictures([realise(spec, rng) for spec in specs])
        with torch.no_grad():
            latents = vae.encode(batch).latents
        error = vae.decode(latents + NOISE * torch.randn_like(latents)).sample - batch
        loss = error.abs().mean() + error.square().mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        if step % 200 == 0:
            log(f"decoder step {step} l1 {error.abs().mean().item():.4f}")


def _rate(step: int, steps: int) -> float:
    """Warm-up, then half a cosine down to one per cent."""
    return min(1.0, step / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _crops(rng: random.Random) -> Tensor:
    """Crops around the shapes: a quarter of the pixels, nearly all of the outlines.

    Half of the colours are arbitrary, so that the colour path stays general. Crops start on
    a multiple of 8, the grid the latents keep on the whole picture.
    """
    drawings = []
    for _ in range(BATCH):
        drawing = realise(sample_spec(rng, with_held_out=True), rng)
        if rng.random() < 0.5:
            drawing = dataclasses.replace(drawing, background=_any_colour(rng))
        if rng.random() < 0.5:
            drawing = dataclasses.replace(drawing, colour=_any_colour(rng))
        drawings.append(drawing)
    whole = pictures(drawings)
    crops = []
    for picture, drawing in zip(whole, drawings, strict=True):
        left, top = _corner(drawing.cx, rng), _corner(drawing.cy, rng)
        crops.append(picture[:, top : top + CROP, left : left + CROP])
    return torch.stack(crops)


def _corner(centre: float, rng: random.Random) -> int:
    wanted = round(centre * SIDE) - CROP // 2 + rng.randint(-18, 18)
    return min(max(wanted, 0), SIDE - CROP) // 8 * 8


def _any_colour(rng: random.Random) -> Rgb:
    return rng.uniform(0, 255), rng.uniform(0, 255), rng.uniform(0, 255)
