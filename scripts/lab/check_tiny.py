"""Checks the tiny model's pictures against their prompts: ``python -m scripts.lab.check_tiny``.

Draws held-out prompts, each with its own seed, reads every picture back by rules that are
not learned, and prints a table per shape, the same for seen combinations, and, as a control,
the held-out pictures against each other's prompts. The last line on stdout is one JSON
document; the exit code is 1 under the bars.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from scripts.lab.tiny_model.picture_check import PictureVerdict, check_picture
from scripts.lab.tiny_model.shapes import PLACES, SHAPES, SIDE, SIZES, Spec, caption, combinations

OVERALL_BAR = 0.95
SHAPE_BAR = 0.85
PROPERTIES = ("background", "colour", "shape", "place", "size", "ok")
BATCH = 10
TIMED = 5  # pictures drawn one by one for the time


@dataclass(frozen=True)
class Sampling:
    """How a picture is drawn."""

    steps: int
    guidance: float


@dataclass(frozen=True)
class Sample:
    """One prompt with the picture drawn for it and what the picture shows of it."""

    spec: Spec
    image: Image.Image
    verdict: PictureVerdict


def choose_specs(count: int, *, held_out: bool, seed: int = 0) -> list[Spec]:
    """Specs with all shapes equally often; combination, size and place by chance."""
    rng = random.Random(seed)
    pools = {s: [c for c in combinations(held_out=held_out) if c[0] == s] for s in SHAPES}
    specs = []
    for index in range(count):
        shape, colour, background = rng.choice(pools[SHAPES[index % len(SHAPES)]])
        size = rng.choice(tuple(SIZES))
        specs.append(Spec(shape, colour, background, size, rng.choice(tuple(PLACES))))
    return specs


def load(folder: Path) -> Any:
    """The model as any diffusers model, without its progress bar."""
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_samples(pipeline: Any, specs: Sequence[Spec], how: Sampling) -> list[Sample]:
    """One picture per spec, the seed being its index, each read back."""
    samples = []
    for start in range(0, len(specs), BATCH):
        batch = specs[start : start + BATCH]
        images = pipeline(
            [caption(spec) for spec in batch],
            num_inference_steps=how.steps,
            guidance_scale=how.guidance,
            generator=[torch.Generator().manual_seed(start + i) for i in range(len(batch))],
        ).images
        samples += [
            Sample(spec, image, check_picture(image, spec))
            for spec, image in zip(batch, images, strict=True)
        ]
    return samples


def shares(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """The share of right pictures per property, for each shape and for all."""
    rows = {shape: [s.verdict for s in samples if s.spec.shape == shape] for shape in SHAPES}
    rows["all"] = [s.verdict for s in samples]
    return {
        name: {p: sum(getattr(v, p) for v in row) / len(row) for p in PROPERTIES}
        for name, row in rows.items()
        if row
    }


def swapped_share(samples: Sequence[Sample]) -> float:
    """The share of pictures that pass for the next sample's prompt: what chance gives."""
    others = [*samples[1:], samples[0]]
    right = [check_picture(a.image, b.spec).ok for a, b in zip(samples, others, strict=True)]
    return sum(right) / len(right)


def seconds_per_picture(pipeline: Any, how: Sampling) -> float:
    """The least time of a single picture over a few: other work on the machine only adds."""
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        pipeline(
            "a red circle on a blue background",
            num_inference_steps=how.steps,
            guidance_scale=how.guidance,
        )
        times.append(time.perf_counter() - start)
    return min(times)


def table(rows: dict[str, dict[str, float]]) -> str:
    """The shares as a Markdown table, in per cent."""
    lines = [f"| shape | {' | '.join(PROPERTIES)} |", "|---" * (len(PROPERTIES) + 1) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[p]:.1%}" for p in PROPERTIES) + " |")
    return "\n".join(lines)


def grid(images: Sequence[Image.Image], columns: int = 10) -> Image.Image:
    """The pictures side by side."""
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * SIDE, rows * SIDE), "grey")
    for index, image in enumerate(images):
        sheet.paste(image, (index % columns * SIDE, index // columns * SIDE))
    return sheet


def passes(rows: dict[str, dict[str, float]]) -> bool:
    """Whether the shares reach the bar overall and the lower one for every shape."""
    worst = min(rows[shape]["ok"] for shape in SHAPES if shape in rows)
    return rows["all"]["ok"] >= OVERALL_BAR and worst >= SHAPE_BAR


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seen", type=int, default=None, help="seen prompts, as many by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="which prompts are chosen")
    parser.add_argument("--grid", type=Path, help="where to save the first 40 held-out pictures")
    parser.add_argument("--failures", type=Path, help="where to save the wrong held-out pictures")
    options = parser.parse_args()
    if options.prompts < len(SHAPES):
        parser.error(f"--prompts must be at least {len(SHAPES)}, one for each shape")
    return options


def main() -> int:
    """Runs the check as the command line says."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    pipeline, how = load(options.model), Sampling(options.steps, options.guidance)
    specs = choose_specs(options.prompts, held_out=True, seed=options.seed)
    held_out = draw_samples(pipeline, specs, how)
    count = options.prompts if options.seen is None else options.seen
    seen_specs = choose_specs(count, held_out=False, seed=options.seed)
    seen = draw_samples(pipeline, seen_specs, how)
    if options.grid:
        grid([sample.image for sample in held_out[:40]]).save(options.grid, optimize=True)
    wrong = [sample for sample in held_out if not sample.verdict.ok]
    if options.failures and wrong:
        grid([sample.image for sample in wrong]).save(options.failures, optimize=True)
    rows = shares(held_out)
    result = {
        "passed": passes(rows),
        "prompts": options.prompts,
        "steps": how.steps,
        "guidance": how.guidance,
        "held_out": rows,
        "seen": shares(seen) if seen else None,
        "held_out_swapped": swapped_share(held_out),
        "seconds_per_picture": round(seconds_per_picture(pipeline, how), 3),
        "wrong": [f"{caption(sample.spec)}: {sample.verdict}" for sample in wrong],
    }
    print(f"Held-out combinations, {options.prompts} prompts:\n{table(rows)}\n")
    if seen:
        print(f"Seen combinations, {count} prompts:\n{table(shares(seen))}\n")
    print(f"Held-out pictures against other prompts: {result['held_out_swapped']:.1%} right")
    print(f"Seconds per picture on {options.threads} thread: {result['seconds_per_picture']}\n")
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
