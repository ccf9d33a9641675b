"""What is known of a loaded model, laid under what its stage says."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from configs.errors import ModelLoadFailed
from configs.known_models import Figure, SavedAs, find_known_model
from configs.scheduler_fields import SHIFTS
from workers.devices.chunk import denoisers
from workers.engine.abilities import inspect_frames, size_multiple
from workers.engine.loading.saved_parts import read_index

logger = logging.getLogger(__name__)

_SIZE = ("width", "height")


@dataclass(frozen=True)
class Defaults:
    """The defaults of a model that do not come from its pipeline.

    Attributes:
        values: By the names of the parameters: the stage's, and what is known for the rest.
        sources: Of what is known: the address of the page that each is from.
        known_as: Title of the known model; None where it is none.
        shift: Of the noise, which the scheduler is given unless the stage says another.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)
    known_as: str | None = None
    shift: Figure | None = None


def find_defaults(pipe: Any, model: str, staged: Mapping[str, Any]) -> Defaults:
    """Return the defaults of a pipeline loaded from `model`, and log what is known of it.

    `model` is a hub id or a folder; `staged` are the stage's `default_sampling_params`, which come
    first. Of a size, either both sides are the stage's or none. What does not fit the pipeline is
    left out, for a model by that name may have been changed.
    """
    found = find_known_model(names_of(model), _saved_as(pipe))
    if found is None:
        logger.info("no settings are known for %s: the pipeline's own are taken", model)
        return Defaults(staged)
    known, sign = found
    figures = {
        name: figure
        for name, figure in known.sampling.items()
        if name not in staged and not (name in _SIZE and any(side in staged for side in _SIZE))
    }
    figures = _fitting(pipe, figures)
    logger.info("settings of %s, known by %s: %s", known.title, sign, _listed(figures))
    return Defaults(
        {**{name: figure.value for name, figure in figures.items()}, **staged},
        {name: figure.source for name, figure in figures.items()},
        known.title,
        next((figure for figure in known.figures if figure.name in SHIFTS), None),
    )


def names_of(model: str) -> list[str]:
    """Return what a model may be called, that by which its folder was saved first.

    A snapshot of the hub is called by its id too: `models--org--name/snapshots/commit`.
    """
    folder = Path(model)
    index = read_index(folder)
    if not index:
        return [model]
    saved_from = index.get("_name_or_path")
    names = [saved_from] if isinstance(saved_from, str) else []
    kind, _, hub_id = folder.parent.parent.name.partition("--")
    if folder.parent.name == "snapshots" and kind == "models":
        names.insert(0, hub_id.replace("--", "/", 1))
    return [*names, model]


def _saved_as(pipe: Any) -> SavedAs:
    denoiser = next(iter(denoisers(pipe).values()), None)
    scheduler = pipe.components.get("scheduler")
    return SavedAs(
        type(pipe).__name__,
        dict(pipe.config),
        dict(getattr(denoiser, "config", {})),
        {**getattr(scheduler, "config", {}), "_class_name": type(scheduler).__name__},
    )


def _fitting(pipe: Any, figures: Mapping[str, Figure]) -> dict[str, Figure]:
    fitting, multiple = dict(figures), size_multiple(pipe)
    if any(fitting[side].value % multiple for side in _SIZE if side in fitting):
        for side in _SIZE:
            del fitting[side]
    if "num_frames" in fitting:
        try:
            fits = inspect_frames(pipe, {"num_frames": fitting["num_frames"].value})
        except ModelLoadFailed:
            fits = {}
        if not fits:
            del fitting["num_frames"]
    return fitting


def _listed(figures: Mapping[str, Figure]) -> str:
    if not figures:
        return "the stage says them all"
    taken = sorted(figures.values(), key=lambda figure: figure.source)
    return "; ".join(
        f"{', '.join(f'{figure.name} {figure.value!r}' for figure in group)} ({source})"
        for source, group in groupby(taken, key=lambda figure: figure.source)
    )
