"""Trains the tiny text-to-image model from nothing: ``python -m scripts.train_tiny --out models/tiny``.

Trains an autoencoder, then a text encoder and a denoiser together, on pictures it draws
itself, and saves a plain diffusers folder in half precision. The work is counted in steps,
never in time, so a busy machine trains the same model later; a stopped run goes on from its
last checkpoint when started again with the same ``--work`` folder. Knows nothing of how the
result is judged (see ``scripts.check_tiny``).
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from scripts import tiny_autoencoder
from scripts.tiny_captions import WORDS, sample_spec, varied_caption
from scripts.tiny_shapes import Spec, realise
from scripts.tiny_tokenizer import MAX_TOKENS, write_tokenizer

PEAK_RATE = 1.3e-3
STEADY = 0.45  # share of the steps at the peak rate, before it falls
EMA = 0.999
EMPTY_CAPTIONS = 0.1  # share of captions left out, for classifier-free guidance
CHECKPOINT_EVERY = 500
REFRESH_EVERY, REFRESH = 12, 64  # steps between refreshes of the pool, pictures in each


class Pool:
    """Encoded pictures with their specs; a part is drawn anew all the time."""

    def __init__(self, vae: Any, size: int, rng: random.Random) -> None:
        self._vae, self._rng, self._next = vae, rng, 0
        self.specs: list[Spec] = [sample_spec(rng) for _ in range(size)]
        self.latents = torch.cat([self._encode(self.specs[i : i + 64]) for i in range(0, size, 64)])

    @torch.no_grad()
    def _encode(self, specs: list[Spec]) -> Tensor:
        batch = tiny_autoencoder.pictures([realise(spec, self._rng) for spec in specs])
        latents: Tensor = self._vae.encode(batch).latents * self._vae.config.scaling_factor
        return latents

    def refresh(self, count: int) -> None:
        start = self._next
        specs = [sample_spec(self._rng) for _ in range(min(count, len(self.specs) - start))]
        self.specs[start : start + len(specs)] = specs
        self.latents[start : start + len(specs)] = self._encode(specs)
        self._next = (start + len(specs)) % len(self.specs)


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


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, a steady part, then a half cosine down to one per cent."""
    done = max(0.0, step / steps - STEADY) / (1 - STEADY)
    return PEAK_RATE * min(1.0, step / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def sample_times(count: int) -> Tensor:
    """Half of the times spread evenly, half around the noise at which the shape is decided."""
    even = (torch.randperm(count // 2) + torch.rand(count // 2)) / (count // 2) * 1000
    middle = 400 + 170 * torch.randn(count - count // 2)
    return torch.cat([even, middle]).long().clamp(0, 999)


def loss_of_batch(
    pool: Pool, tokenizer: Any, encoder: Any, denoiser: Any, alphas: Tensor, batch: int, rng: random.Random
) -> Tensor:
    """The v-prediction error on one random batch of the pool."""
    chosen = torch.randint(0, len(pool.specs), (batch,))
    captions = [
        "" if rng.random() < EMPTY_CAPTIONS else varied_caption(pool.specs[i], rng) for i in chosen.tolist()
    ]
    tokens = tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    clean, times = pool.latents[chosen], sample_times(batch)
    alpha = alphas[times].view(-1, 1, 1, 1)
    noise = torch.randn_like(clean)
    noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
    velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
    guess = denoiser(noisy, times, encoder(tokens)[0], return_dict=False)[0]
    return F.mse_loss(guess, velocity)


def train_denoiser(options: argparse.Namespace, vae: Any, tokenizer: Any, log: Any) -> tuple[Any, Any]:
    """Trains text encoder and denoiser together and returns their averaged weights."""
    encoder, denoiser = build_text_encoder(tokenizer), build_denoiser()
    weights = [*denoiser.parameters(), *encoder.parameters()]
    average = [w.detach().clone() for w in weights]
    optimiser = torch.optim.AdamW(weights, lr=PEAK_RATE, weight_decay=1e-4, betas=(0.9, 0.98), fused=True)
    checkpoint, first = options.work / "checkpoint.pt", 1
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        optimiser.load_state_dict(state["optimiser"])
        for ours, stored in zip([*weights, *average], state["tensors"], strict=True):
            ours.data.copy_(stored)
        first = state["step"] + 1
        log(f"resumed after step {state['step']}")
    rng = random.Random(options.seed + first)
    torch.manual_seed(options.seed + first)
    pool = Pool(vae, options.pool, rng)
    alphas, running = build_scheduler().alphas_cumprod, float("nan")
    log(f"denoiser {sum(w.numel() for w in weights)} weights, pool deviation {pool.latents.std().item():.3f}")
    for step in range(first, options.steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, options.steps)
        loss = loss_of_batch(pool, tokenizer, encoder, denoiser, alphas, options.batch, rng)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        keep = min(EMA, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [w.detach() for w in weights], 1 - keep)
        running = loss.item() if math.isnan(running) else 0.99 * running + 0.01 * loss.item()
        if step % REFRESH_EVERY == 0:
            pool.refresh(REFRESH)
        if step % 200 == 0:
            log(f"denoiser step {step}/{options.steps} loss {running:.4f}")
        if step % CHECKPOINT_EVERY == 0 or step == options.steps:
            tensors = [w.detach() for w in [*weights, *average]]
            partial = checkpoint.with_suffix(".partial")
            torch.save({"step": step, "optimiser": optimiser.state_dict(), "tensors": tensors}, partial)
            partial.replace(checkpoint)
    for weight, mean in zip(weights, average, strict=True):
        weight.data.copy_(mean)
    return encoder.eval(), denoiser.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--work", type=Path, default=Path("build/train_tiny"), help="folder for checkpoints")
    parser.add_argument("--autoencoder-steps", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=14000, help="steps of the denoiser")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--pool", type=int, default=20032, help="encoded pictures kept at a time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - started:7.1f}s] {line}", flush=True)

    tokenizer = write_tokenizer(options.work / "tokenizer", WORDS)
    vae_folder = options.work / "vae"
    if not vae_folder.exists():
        tiny_autoencoder.train(options.autoencoder_steps, random.Random(options.seed), log).save_pretrained(vae_folder)
    vae: Any = AutoencoderTiny.from_pretrained(vae_folder).eval()
    encoder, denoiser = train_denoiser(options, vae, tokenizer, log)
    pipeline = StableDiffusionPipeline(
        vae, encoder, tokenizer, denoiser, build_scheduler(), None, None, requires_safety_checker=False
    )
    pipeline.to(dtype=torch.float16).save_pretrained(options.out, safe_serialization=True)
    log(f"saved {options.out}")


if __name__ == "__main__":
    main()
