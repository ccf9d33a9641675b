"""Trains the tiny text-to-image model from nothing.

``python -m scripts.lab.train_tiny --work build/tiny --out models/tiny`` makes the shipped model.

Trains an autoencoder, then a text encoder and a denoiser together, on pictures it draws
itself, and saves a plain diffusers folder in half precision. The work is counted in steps,
never in time, so a busy machine only takes longer; a stopped run goes on from its last
checkpoint when started again with the same ``--work`` folder.
``scripts.lab.check_tiny`` judges the result.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderTiny, StableDiffusionPipeline

from scripts.lab.tiny_model import autoencoder, denoiser
from scripts.lab.tiny_model.networks import build_scheduler, write_tokenizer
from scripts.lab.tiny_model.shapes import WORDS


def parse_options() -> argparse.Namespace:
    """The command line; the defaults make the shipped model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--autoencoder-steps", type=int, default=5000)
    parser.add_argument("--decoder-steps", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=13500, help="steps of the denoiser")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--pool", type=int, default=20032, help="encoded pictures kept at a time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_in_single_precision(config: Path) -> None:
    """Names float32 as the text encoder's default: transformers would else load it as stored.

    diffusers loads its own parts in float32 whatever they are stored in, and a pipeline of both
    precisions fails. An explicit ``torch_dtype`` still decides for all parts.
    """
    values = json.loads(config.read_text(encoding="utf-8")) | {"dtype": "float32"}
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def trained_autoencoder(options: argparse.Namespace, log: Callable[[str], None]) -> Any:
    """The autoencoder of the work folder, trained if it is not there."""
    folder = options.work / "vae"
    if not folder.exists():
        rng = random.Random(options.seed)
        trained = autoencoder.train(options.autoencoder_steps, rng, log)
        autoencoder.polish_decoder(trained, options.decoder_steps, rng, log)
        trained.save_pretrained(folder)
    vae: Any = AutoencoderTiny.from_pretrained(folder, local_files_only=True)
    return vae.eval()


def main() -> None:
    """Trains what is not yet trained and saves the whole."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - started:7.1f}s] {line}", flush=True)

    tokenizer = write_tokenizer(options.work / "tokenizer", WORDS)
    vae = trained_autoencoder(options, log)
    plan = denoiser.Plan(
        steps=options.steps,
        batch=options.batch,
        pool=options.pool,
        seed=options.seed,
        checkpoint=options.work / "checkpoint.pt",
    )
    encoder, unet = denoiser.train(plan, vae, tokenizer, log)
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    vae.register_to_config(_name_or_path="")  # else the path of the work folder is saved
    pipeline.to(dtype=torch.float16).save_pretrained(options.out, safe_serialization=True)
    for name in ("vocab.json", "merges.txt"):  # what older versions of transformers read
        shutil.copy(options.work / "tokenizer" / name, options.out / "tokenizer" / name)
    load_in_single_precision(options.out / "text_encoder" / "config.json")
    log(f"saved {options.out}")


if __name__ == "__main__":
    main()
