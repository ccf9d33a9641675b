"""Writes docs/models.md: what each family can do, as its tiny pipeline showed when it was run.

`python -m scripts.lab.models_table` prints the page; `--write` puts it where it belongs;
`--settings` writes only the table of known settings, for which nothing is run.
"""

import argparse
import logging
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.settings import REPOSITORY
from scripts.lab.families import FAMILIES, save_family
from scripts.lab.family_trial import Trial, try_family
from scripts.lab.settings_table import settings_section, with_settings
from workers.engine.schedulers import SOLVERS

COLUMNS = 10


PAGE = REPOSITORY / "docs" / "models.md"


@dataclass(frozen=True)
class ModelFamily:
    """What cannot be found by running.

    Attributes:
        title: Its name.
        ids: Models of it on the hub, by their ids.
        hint: What its stage or its requests should say.
    """

    title: str
    ids: tuple[str, ...]
    hint: str = ""


TITLES = {
    "tiny": ModelFamily("The bundled model", ("models/tiny",)),
    "stable_diffusion": ModelFamily(
        "Stable Diffusion 1", ("stable-diffusion-v1-5/stable-diffusion-v1-5",)
    ),
    "stable_diffusion_xl": ModelFamily(
        "Stable Diffusion XL",
        ("stabilityai/stable-diffusion-xl-base-1.0",),
        "image to image has the strength 0.3 by default, so give it 4 steps or more",
    ),
    "stable_diffusion_3": ModelFamily(
        "Stable Diffusion 3",
        (
            "stabilityai/stable-diffusion-3.5-medium",
            "stabilityai/stable-diffusion-3.5-large",
            "stabilityai/stable-diffusion-3-medium-diffusers",
        ),
    ),
    "flux": ModelFamily(
        "FLUX.1",
        ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"),
        "schnell has no guidance",
    ),
    "flux_kontext": ModelFamily("FLUX.1 Kontext", ("black-forest-labs/FLUX.1-Kontext-dev",)),
    "qwen_image": ModelFamily(
        "Qwen-Image",
        ("Qwen/Qwen-Image",),
        "its guidance is `true_cfg_scale`; a request without a `negative_prompt` gets one with"
        " nothing in it, for without one there is no guidance",
    ),
    "qwen_image_edit": ModelFamily(
        "Qwen-Image-Edit",
        ("Qwen/Qwen-Image-Edit",),
        "guidance as Qwen-Image; without `strength`. `Qwen/Qwen-Image-Edit-2509` goes by the same"
        " rules, with up to three images",
    ),
    "pixart": ModelFamily("PixArt-alpha", ("PixArt-alpha/PixArt-XL-2-1024-MS",)),
    "sana": ModelFamily("Sana", ("Efficient-Large-Model/Sana_1600M_1024px_diffusers",)),
    "z_image": ModelFamily("Z-Image", ("Tongyi-MAI/Z-Image-Turbo",)),
    "wan": ModelFamily(
        "Wan, text to video",
        (
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        ),
        "TI2V-5B does image to video too",
    ),
    "wan_image_to_video": ModelFamily("Wan, image to video", ("Wan-AI/Wan2.2-I2V-A14B-Diffusers",)),
    "ltx": ModelFamily("LTX-Video", ("Lightricks/LTX-Video",)),
    "latte": ModelFamily(
        "Latte",
        ("maxin-cn/Latte-1",),
        "`num_frames` is 16, or 1. With several outputs it treats"
        " the padding of the text otherwise: output k is not quite that of seed + k",
    ),
}


_HEAD = """\
# Models

Any pipeline of diffusers 0.42 that makes images or videos from a prompt, and from an image and a
mask where it takes them, and that has one noise scheduler. Nothing is registered: what a model can
do is read from its pipeline when a replica loads it, published (`GET /v1/models` says it), and
checked before a request is queued. A family that nobody here has seen runs too; if its denoiser has
an argument that no rule covers, its requests run their steps alone.

The table is what came out when a tiny pipeline of each family, of random weights, was saved to a
folder, loaded by the loader of the replicas and run by their engine, on a CPU:
`python -m scripts.lab.models_table --write`. A test runs it again. **None but the bundled model
was run for it with its real weights.** [families.md](families.md) has the pipelines beyond these:
every one that diffusers tests itself with, tried in the same way.

| family | pipeline | tasks | merges | cancel | preview | size multiple | LoRA | context parallel \
| schedulers |
|---|---|---|---|---|---|---|---|---|---|
"""


_LEGEND = """
- *tasks* beyond the first run with the same weights, as further pipelines over the same parts.
- *merges*: two requests of other seeds and prompts share the calls of the denoiser and come out
  within 1/255 of what each makes alone.
- *cancel*: a run ended between two steps decodes nothing, and the next one of the same seed makes
  the same pixels.
- *size multiple*: pixels that width and height must be a multiple of. PixArt and Sana compute at
  the nearest size that they were trained for and scale to the size asked for.
- *LoRA*: the pipeline can take adapters. *context parallel*: its denoiser says how to be cut over
  devices (`ulysses_degree`, `ring_degree`).
- *schedulers*: which list of noise schedulers a request may choose from, see
  [schedulers.md](schedulers.md).

In every family the guidance of a running request can be changed: `guidance_scale`, and
`true_cfg_scale` where it guides by that. `tests/engine/test_running_guidance.py` holds each against
another way to the same.

## What to write

| family | `engine_args.model` | mind |
|---|---|---|
"""


_FOOT = """
A stage for one of them, two replicas of one GPU each:

```yaml
stages:
  - stage_id: 0
    stage_type: diffusion
    runtime:
      devices: "0,1"
      num_replicas: 2
    engine_args:
      model: Wan-AI/Wan2.2-TI2V-5B-Diffusers
    default_sampling_params:
      num_inference_steps: 40
      num_frames: 81
      fps: 24
```

## Types of the weights

`engine_args.dtype` is a word for the whole pipeline, or says it part by part:
`dtype: {default: bfloat16, vae: float32}`. A part that is not named has `default`, and what is left
to `auto` has on a GPU the first of these that applies:

1. The type that the table of known settings has for that part of that model.
2. float32 for an autoencoder that its makers run so: Wan's (`AutoencoderKLWan`, which several
   families share), and one that its pipeline would bring to float32 for each picture
   (`force_upcast`: SDXL, Kolors and others of their kind).
3. The type of the denoiser: as it is saved where that is float16 or bfloat16, else bfloat16. On a
   GPU that only emulates bfloat16 (compute capability below 8.0: T4, V100, RTX 20) it is float16.

| family | on a GPU from Ampere on | on a T4, V100 or RTX 20 |
|---|---|---|
| Stable Diffusion 1 and 2, PixArt, Latte \
| as the denoiser is saved, bfloat16 where that is float32 | float16 |
| Stable Diffusion XL, Kolors \
| the same; autoencoder float32 unless it says `force_upcast: false` \
| float16; autoencoder float32 |
| Stable Diffusion 3, FLUX.1, FLUX.2, Qwen-Image, Z-Image, LTX-Video | bfloat16 | float16 |
| Sana | as the denoiser is saved; text encoder and autoencoder bfloat16 | float16; the same |
| Wan, SkyReels-V2 \
| bfloat16; autoencoder float32, the image encoder of Wan 2.1 too | float16; the same |
| CogVideoX 2B | float16 | float16 |

On a CPU `auto` is float32. The replica's log says at start what each part gets and why, and
`GET /v1/models` shows it (`dtypes`, `dtype_sources`). Parts that a denoiser of diffusers keeps in
float32 whatever is asked for (Wan's norms) stay so. A request that comes to NaN or infinity below
float32 is made once more in float32.
"""


def row(name: str, trial: Trial) -> str:
    """Return the line of a family in the table of what came out."""
    cells = (
        TITLES[name].title,
        f"`{trial.pipeline}`",
        ", ".join(trial.abilities.tasks),
        trial.merges,
        _yes(trial.cancels),
        _yes(trial.previews),
        str(trial.abilities.size_multiple),
        _yes(trial.lora),
        _yes(trial.context_parallel),
        _list_of(trial.abilities.schedulers),
    )
    return f"| {' | '.join(cells)} |"


def page(names: Iterable[str], rows: Sequence[str]) -> str:
    """Return the whole page, of families in that order and their lines of the table."""
    models = [
        f"| {TITLES[name].title} | {', '.join(f'`{each}`' for each in TITLES[name].ids)} "
        f"| {TITLES[name].hint} |"
        for name in names
    ]
    tried = _HEAD + "\n".join(rows) + "\n" + _LEGEND + "\n".join(models) + "\n" + _FOOT
    return tried + settings_section()


def trial_of(name: str, folder: Path) -> Trial:
    """Try one family; `folder` is an empty one."""
    bundled = REPOSITORY / "models" / "tiny"
    return try_family(bundled if name == "tiny" else save_family(name, folder))


def main() -> None:
    """Try every family, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} in docs/")
    parser.add_argument(
        "--settings", action="store_true", help="write the table of known settings alone"
    )
    options = parser.parse_args()
    if options.settings:
        PAGE.write_text(with_settings(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    trials = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tiny", *FAMILIES):
            trials[name] = trial_of(name, Path(folder) / name)
    text = page(trials, [row(name, trial) for name, trial in trials.items()])
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


def _list_of(schedulers: Sequence[str]) -> str:
    if len(schedulers) == 1:
        return "own"
    return "flow" if set(schedulers) == set(SOLVERS) else "usual"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


if __name__ == "__main__":
    main()
