"""Settings known to suit published models, with the page that each figure is from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml
from marshmallow import RAISE, Schema, ValidationError, fields, post_load, pre_load, validate

from configs.fields import Number, OneOf, Text, Whole
from configs.parameters import PARAMETERS
from configs.stage_schema import sampling_field

KNOWN_MODELS_FILE: Final = Path(__file__).with_name("known_models.yaml")

# Those that `default_sampling_params` of a stage may say too.
SAMPLING_FIGURES: Final = tuple(
    name for name, parameter in PARAMETERS.items() if parameter.stage_default
)

# Those of how the model is loaded.
LOADING_FIGURES: Final = ("shift", "flow_shift", "dtype")

_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Figure:
    """One setting and the address of the public page that says so."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class SavedAs:
    """What is saved with a model and tells it from others.

    Attributes:
        pipeline: Class of the pipeline.
        index: Entries of model_index.json; None is an entry that is missing.
        denoiser: Entries of the configuration of its transformer or U-Net.
        scheduler: Entries of the configuration of its noise scheduler, `_class_name` among them.
    """

    pipeline: str
    index: Mapping[str, Any] = field(default_factory=dict)
    denoiser: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def conditions(self) -> int:
        """Number of entries that must agree."""
        return 1 + len(self.index) + len(self.denoiser) + len(self.scheduler)

    def agrees(self, other: "SavedAs") -> bool:
        """Tell whether all that this one says is so in `other`, which may say more."""
        return self.pipeline == other.pipeline and all(
            there.get(name) == value
            for here, there in (
                (self.index, other.index),
                (self.denoiser, other.denoiser),
                (self.scheduler, other.scheduler),
            )
            for name, value in here.items()
        )


@dataclass(frozen=True)
class MemoryNote:
    """What is known of the memory that a model needs, and the page that says so."""

    note: str
    source: str


@dataclass(frozen=True)
class KnownModel:
    """One published model, or several of the same settings.

    Attributes:
        title: Its name for a reader.
        year: When it was published.
        ids: Its ids on the hub; none where it is known by what is saved alone.
        saved: What is saved with it; None where that does not tell it from others.
        figures: Its settings.
        parameters: Of each part, in billions; empty where not all of them are known.
        memory: What it needs; None where nothing was found.
        note: What else there is to mind.
    """

    title: str
    year: int
    ids: tuple[str, ...]
    saved: SavedAs | None
    figures: tuple[Figure, ...]
    parameters: Mapping[str, float]
    memory: MemoryNote | None
    note: str | None

    def figure(self, name: str) -> Any:
        """Return the value of a setting; None where it has none."""
        return next((figure.value for figure in self.figures if figure.name == name), None)

    @property
    def sampling(self) -> dict[str, Figure]:
        """Its settings that a request may have, by their names."""
        return {figure.name: figure for figure in self.figures if figure.name in SAMPLING_FIGURES}

    @property
    def part_gb(self) -> dict[str, float]:
        """Size of the weights of each part in its type, in 10^9 bytes; empty if unknown."""
        dtypes: Mapping[str, str] = self.figure("dtype") or {}
        return {
            part: billions * _BYTES[dtypes.get(part, "bfloat16")]
            for part, billions in self.parameters.items()
        }

    @property
    def weights_gb(self) -> float | None:
        """Size of all its weights, in 10^9 bytes; None where it is not known."""
        return sum(self.part_gb.values()) or None


class _StrictSchema(Schema):
    class Meta:
        unknown: ClassVar[str] = RAISE


_SOURCE: Final = validate.URL(schemes={"https"})
_HUB_ID: Final = validate.Regexp(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")


class _FiguresSchema(_StrictSchema):
    class Meta(_StrictSchema.Meta):
        include: ClassVar[dict[str, fields.Field[Any]]] = {
            name: sampling_field(PARAMETERS[name]) for name in SAMPLING_FIGURES
        }

    source = Text(required=True, validate=_SOURCE)
    shift = Number(0, 100, "shift of the noise")
    flow_shift = Number(0, 100, "shift of the noise")
    dtype = fields.Dict(Text(), OneOf(*_BYTES))

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> list[Figure]:
        source = data.pop("source")
        return [Figure(name, value, source) for name, value in data.items()]


class _SavedAsSchema(_StrictSchema):
    pipeline = Text("FluxPipeline", required=True)
    index = fields.Dict(Text())
    denoiser = fields.Dict(Text())
    scheduler = fields.Dict(Text())

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> SavedAs:
        return SavedAs(**data)


class _MemorySchema(_StrictSchema):
    source = Text(required=True, validate=_SOURCE)
    note = Text("24 GB with offloading", required=True)

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> MemoryNote:
        return MemoryNote(**data)


class _ModelSchema(_StrictSchema):
    title = Text("FLUX.1 dev", required=True)
    year = Whole(2022, 2026, "the year", required=True)
    ids = fields.List(Text(validate=_HUB_ID), load_default=list)
    saved = fields.Nested(_SavedAsSchema, load_default=None)
    figures = fields.List(
        fields.Nested(_FiguresSchema), required=True, validate=validate.Length(min=1)
    )
    parameters = fields.Dict(Text(), Number(0, 1_000, "billions"), load_default=dict)
    memory = fields.Nested(_MemorySchema, load_default=None)
    note = Text("1 to 4 steps", load_default=None)

    @pre_load
    def _need_a_sign(self, data: Any, **_: Any) -> Any:
        if isinstance(data, Mapping) and not data.get("ids") and not data.get("saved"):
            raise ValidationError("has neither ids nor saved, so no model is found by it")
        return data

    @post_load
    def _build(self, data: dict[str, Any], **_: Any) -> KnownModel:
        figures = tuple(figure for group in data.pop("figures") for figure in group)
        names = [figure.name for figure in figures]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValidationError({"figures": [f"says twice: {', '.join(sorted(twice))}"]})
        return KnownModel(**{**data, "ids": tuple(data["ids"]), "figures": figures})


class _FileSchema(_StrictSchema):
    models = fields.List(fields.Nested(_ModelSchema), required=True)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all models of the file, in its order.

    Raises:
        marshmallow.ValidationError: The file is wrong.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with KNOWN_MODELS_FILE.open(encoding="utf-8") as file:
        data = yaml.load(file, Loader=loader)  # noqa: S506 - a SafeLoader, the one written in C
    return tuple(_FileSchema().load(data)["models"])


def find_known_model(names: Iterable[str], saved: SavedAs) -> tuple[KnownModel, str] | None:
    """Return the model that a pipeline is and the sign it was known by; None where none is.

    `names` are what it may be called, the surest first: hub ids and paths of folders. Of a path the
    last part counts, or the hub id in it where it is that of a cache. Names count before what is
    `saved`.
    """
    for name in names:
        hub_id = _hub_id(name)
        found = _by_id().get(hub_id.lower())
        if found is not None:
            return found, f"the name {hub_id}"
        found = _by_folder().get(Path(name).name.lower())
        # A folder may have any name: what is in it must not be another kind of model.
        if found is not None and (found.saved is None or found.saved.pipeline == saved.pipeline):
            return found, f"the folder's name {Path(name).name}"
    agreeing = [
        (model.saved.conditions, model)
        for model in known_models()
        if model.saved is not None and model.saved.agrees(saved)
    ]
    if not agreeing:
        return None
    return max(agreeing, key=lambda each: each[0])[1], "what is saved with it"


def _hub_id(name: str) -> str:
    """The id in a name; a folder of the hub's cache is `models--org--name/snapshots/...`."""
    cached = next((part for part in Path(name).parts if part.startswith("models--")), None)
    return name if cached is None else cached.removeprefix("models--").replace("--", "/", 1)


@cache
def _by_id() -> dict[str, KnownModel]:
    return {each.lower(): model for model in known_models() for each in model.ids}


@cache
def _by_folder() -> dict[str, KnownModel]:
    return {each.partition("/")[2]: model for each, model in _by_id().items()}
