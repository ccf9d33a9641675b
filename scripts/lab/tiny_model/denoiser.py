"""The tiny model's text encoder and denoiser: how they are trained together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.lab.tiny_model import autoencoder
from scripts.lab.tiny_model.networks import (
    MAX_TOKENS,
    build_denoiser,
    build_scheduler,
    build_text_encoder,
)
from scripts.lab.tiny_model.shapes import Spec, realise, sample_spec, varied_caption

PEAK_RATE = 1.3e-3
STEADY = 0.45  # share of the steps at the peak rate, before it falls
EMA = 0.999
EMPTY_CAPTIONS = 0.1  # share of captions left out, for classifier-free guidance
CHECKPOINT_EVERY = 500


REFRESH_EVERY, REFRESH = 12, 64  # steps between refreshes of the pool, pictures in each


@dataclass(frozen=True)
class Plan:
    """How long and on how much the denoiser is trained, and where its checkpoint lies."""

    steps: int
    batch: int
    pool: int
    seed: int
    checkpoint: Path


class Pool:
    """Encoded pictures with their specs; a part is drawn anew all the time."""

    def __init__(self, vae: Any, size: int, rng: random.Random) -> None:
        self._vae, self._rng, self._next = vae, rng, 0
        self.specs: list[Spec] = [sample_spec(rng) for _ in range(size)]
        self.latents = torch.cat([self._encode(self.specs[i : i + 64]) for i in range(0, size, 64)])

    @torch.no_grad()
    def _encode(self, specs: list[Spec]) -> Tensor:
        batch = autoencoder.pictures([realise(spec, self._rng) for spec in specs])
        latents: Tensor = self._vae.encode(batch).latents * self._vae.config.scaling_factor
        return latents

    def batch(self, count: int) -> tuple[list[Spec], Tensor]:
        """Random entries of the pool."""
        chosen = torch.randint(0, len(self.specs), (count,))
        return [self.specs[i] for i in chosen.tolist()], self.latents[chosen]

    def refresh(self, count: int) -> None:
        """Draws the next ``count`` entries anew, going round."""
        start = self._next
        specs = [sample_spec(self._rng) for _ in range(min(count, len(self.specs) - start))]
        self.specs[start : start + len(specs)] = specs
        self.latents[start : start + len(specs)] = self._encode(specs)
        self._next = (start + len(specs)) % len(self.specs)


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, a steady part, then a half cosine down to one per cent."""
    done = max(0.0, step / steps - STEADY) / (1 - STEADY)
    return PEAK_RATE * min(1.0, step / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def sample_times(count: int) -> Tensor:
    """Half of the times spread evenly, half around the noise at which the shape is decided."""
    even = (torch.randperm(count // 2) + torch.rand(count // 2)) / (count // 2) * 1000
    middle = 400 + 170 * torch.randn(count - count // 2)
    return torch.cat([even, middle]).long().clamp(0, 999)


@dataclass
class Trainee:
    """The two networks, the average of their weights, and the optimiser that moves them."""

    encoder: Any
    denoiser: Any
    weights: list[nn.Parameter]
    average: list[Tensor]
    optimiser: torch.optim.Optimizer

    def save(self, path: Path, step: int) -> None:
        """Writes a checkpoint; a crash in between leaves the former one."""
        tensors = [w.detach() for w in (*self.weights, *self.average)]
        partial = path.with_suffix(".partial")
        state = {"step": step, "optimiser": self.optimiser.state_dict(), "tensors": tensors}
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> int:
        """Takes a checkpoint over and returns its step."""
        state = torch.load(path, weights_only=True)
        self.optimiser.load_state_dict(state["optimiser"])
        for ours, stored in zip((*self.weights, *self.average), state["tensors"], strict=True):
            ours.data.copy_(stored)
        return int(state["step"])

    def follow(self, step: int) -> None:
        """Moves the average a little towards the weights, faster in the first steps."""
        keep = min(EMA, (1 + step) / (10 + step))
        for mean, weight in zip(self.average, self.weights, strict=True):
            mean.lerp_(weight.detach(), 1 - keep)


def build_trainee(tokenizer: Any) -> Trainee:
    """Both networks at their start."""
    encoder, denoiser = build_text_encoder(tokenizer), build_denoiser()
    weights = [*denoiser.parameters(), *encoder.parameters()]
    average = [w.detach().clone() for w in weights]
    optimiser = torch.optim.AdamW(
        weights, lr=PEAK_RATE, weight_decay=1e-4, betas=(0.9, 0.98), fused=True
    )
    return Trainee(encoder, denoiser, weights, average, optimiser)


def loss_of_batch(
    batch: tuple[list[Spec], Tensor],
    tokenizer: Any,
    trainee: Trainee,
    alphas: Tensor,
    rng: random.Random,
) -> Tensor:
    """The v-prediction error on one batch of specs and their latents."""
    specs, clean = batch
    captions = ["" if rng.random() < EMPTY_CAPTIONS else varied_caption(s, rng) for s in specs]
    tokens = tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    times = sample_times(len(specs))
    alpha = alphas[times].view(-1, 1, 1, 1)
    noise = torch.randn_like(clean)
    noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
    velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
    states = trainee.encoder(tokens)[0]
    guess = trainee.denoiser(noisy, times, states, return_dict=False)[0]
    return nn.functional.mse_loss(guess, velocity)


def train(plan: Plan, vae: Any, tokenizer: Any, log: Callable[[str], None]) -> tuple[Any, Any]:
    """Trains text encoder and denoiser together and returns both with averaged weights."""
    torch.manual_seed(plan.seed)
    trainee, first = build_trainee(tokenizer), 1
    if plan.checkpoint.exists():
        first = trainee.load(plan.checkpoint) + 1
        log(f"resumed after step {first - 1}")
    # A resumed run draws other pictures than the first part, not the same ones again.
    rng = random.Random(plan.seed + first)
    torch.manual_seed(plan.seed + first)
    pool = Pool(vae, plan.pool, rng)
    alphas, running = build_scheduler().alphas_cumprod, float("nan")
    for step in range(first, plan.steps + 1):
        for group in trainee.optimiser.param_groups:
            group["lr"] = learning_rate(step, plan.steps)
        loss = loss_of_batch(pool.batch(plan.batch), tokenizer, trainee, alphas, rng)
        trainee.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trainee.weights, 1.0)
        trainee.optimiser.step()
        trainee.follow(step)
        running = loss.item() if math.isnan(running) else 0.99 * running + 0.01 * loss.item()
        if step % REFRESH_EVERY == 0:
            pool.refresh(REFRESH)
        if step % 200 == 0:
            log(f"denoiser step {step}/{plan.steps} loss {running:.4f}")
        if step % CHECKPOINT_EVERY == 0 or step == plan.steps:
            trainee.save(plan.checkpoint, step)
    for weight, mean in zip(trainee.weights, trainee.average, strict=True):
        weight.data.copy_(mean)
    return trainee.encoder.eval(), trainee.denoiser.eval()
