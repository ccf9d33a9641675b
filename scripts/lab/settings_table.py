"""The table of docs/models.md that is made of configs/known_models.yaml."""

from collections.abc import Mapping

from configs.known_models import Figure, KnownModel, known_models

HEADING = "\n## Known settings\n"

_HEAD = (
    HEADING
    + """
What a stage's `default_sampling_params` leave out is taken from this table where the model is in
it, and only then from the pipeline. A model is known by its hub id (also as the name of its folder,
or in its `model_index.json`), else by what is saved with it: the class of its pipeline,
`is_distilled`, `guidance_embeds`, its scheduler. The replica's log says at start which settings it
took and why; `GET /v1/models` says from where each default is (`default_sources`). The data, with
the page that each figure is from, is [configs/known_models.yaml](../configs/known_models.yaml);
`python -m scripts.lab.models_table --settings` makes this table of it.

*Guidance* is `guidance_scale`, or `true_cfg_scale` where it says *true*. *Shift* is given to the
noise scheduler, whatever is saved with the model
([how that is said](schedulers.md#the-scheduler-of-a-stage)); *types* is what `dtype: auto` gives
these parts on a GPU. *Weights* are those of all parts, in 10^9 bytes, in bfloat16 but for the parts
of other types: the memory that a replica needs without offloading, before that of its runs.
**None of these was run here with its real weights.**

| model | steps | guidance | size | frames | shift | types | weights, GB | memory | mind | sources |
|---|---|---|---|---|---|---|---|---|---|---|
"""
)


def settings_section() -> str:
    """Return the part of the page that is made of the known models, from its heading on."""
    return _HEAD + "\n".join(map(_row, known_models())) + "\n"


def with_settings(page: str) -> str:
    """Return a page with its table of known settings, which is its last part, made anew."""
    return page.partition(HEADING)[0] + settings_section()


def _row(model: KnownModel) -> str:
    figures = {figure.name: figure for figure in model.figures}
    weights = model.weights_gb
    cells = (
        _named(model),
        _cell(figures, "num_inference_steps"),
        _guidance(figures),
        _size(figures),
        _frames(figures),
        _cell(figures, "shift") or _cell(figures, "flow_shift"),
        ", ".join(f"{part} {kind}" for part, kind in (model.figure("dtype") or {}).items()),
        "" if weights is None else f"{weights:.1f}",
        model.memory.note if model.memory else "",
        model.note or "",
        _sources(model),
    )
    return f"| {' | '.join(cells)} |"


def _named(model: KnownModel) -> str:
    ids = ", ".join(f"`{each}`" for each in model.ids)
    return f"{model.title}: {ids}" if ids else model.title


def _cell(figures: Mapping[str, Figure], name: str) -> str:
    return f"{figures[name].value:g}" if name in figures else ""


def _guidance(figures: Mapping[str, Figure]) -> str:
    true = _cell(figures, "true_cfg_scale")
    return f"true {true}" if true else _cell(figures, "guidance_scale")


def _size(figures: Mapping[str, Figure]) -> str:
    return f"{_cell(figures, 'width')}x{_cell(figures, 'height')}" if "width" in figures else ""


def _frames(figures: Mapping[str, Figure]) -> str:
    frames, fps = _cell(figures, "num_frames"), _cell(figures, "fps")
    return f"{frames} at {fps}/s" if frames and fps else frames


def _sources(model: KnownModel) -> str:
    pages = [figure.source for figure in model.figures]
    if model.memory:
        pages.append(model.memory.source)
    return " ".join(f"[{n}]({each})" for n, each in enumerate(dict.fromkeys(pages), start=1))
