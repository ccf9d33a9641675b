"""The dialects of stage files, all turned into the reference's before any schema sees them.

    reference    stages: [{stage_id, stage_type, runtime: {...}, engine_args: {...}}]
    stage_args   the same under `stage_args`, with a `runtime` of the whole file beside it
    deploy       stages: [{stage_id, devices, num_replicas, max_num_seqs, ...}], flat, of 0.30

Keys that the service does not have are removed: listed where they change nothing, refused by name
where they would. Every path in a message is the one that stands in the file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from marshmallow import ValidationError

from configs.errors import FieldError
from configs.fields import with_value
from configs.foreign.keys import BY_PLACE, Place
from configs.foreign.other_models import other_model
from configs.foreign.overlays import OTHER_PLATFORMS, SERVED_PLATFORM, lay_over_stages
from configs.stage_schema import EngineArgsSchema, ParallelConfigSchema, RuntimeSchema, StageSchema

Dialect = Literal["reference", "stage_args", "deploy"]


_NO_MODEL: Final = (
    "is missing; write it here, or on the command line "
    "(python -m scripts.serve MODEL --stage-configs-path FILE)"
)
_ELSEWHERE: Final = re.compile(r", which belongs under (?:runtime|engine_args(?:\.\w+)?)")
_HOME: Final = re.compile(r"under (?:runtime|engine_args)(?![.\w])")


@dataclass
class Translation:
    """A stage file in the reference dialect, and how it differs from what was written.

    Attributes:
        dialect: Which one it was.
        document: In the reference dialect; not yet checked.
        faults: Keys that are refused because the service does not have them.
        ignored: Paths, as written, of keys that change nothing here.
        names: Paths of the document, to where the same stands in the file.
        other: Why the file is for no diffusion model; nothing else of it matters then.
    """

    dialect: Dialect
    document: dict[Any, Any]
    faults: list[FieldError] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    other: FieldError | None = None

    def written(self, path: str) -> str:
        """Return where in the file the thing stands that has this path in the document."""
        for prefix in sorted(self.names, key=len, reverse=True):
            rest = path.removeprefix(prefix)
            if path.startswith(prefix) and (not rest or rest[0] in ".["):
                return self.names[prefix] + rest
        return self._flat(path) if self.dialect == "deploy" else path

    def reworded(self, fault: FieldError) -> FieldError:
        """Return the fault with its paths as they stand in the file."""
        message = fault.message
        no_model = fault.code == "missing" and fault.param.endswith(".engine_args.model")
        if no_model and self.dialect != "reference":
            message = _NO_MODEL
        if self.dialect == "stage_args":
            message = message.replace("stages[", "stage_args[")
        elif self.dialect == "deploy":
            message = self._flat(_HOME.sub("in the stage itself", _ELSEWHERE.sub("", message)))
        return FieldError(self.written(fault.param), message, fault.code)

    @staticmethod
    def _flat(text: str) -> str:
        return text.replace("engine_args.", "").replace("runtime.", "")

    def ignore(self, path: str) -> None:
        """Note a key that changes nothing; `path` is that of the document."""
        written = self.written(path)
        if written not in self.ignored:
            self.ignored.append(written)

    def refuse(self, path: str, value: Any, reason: str) -> None:
        """Note a key that is refused; `path` is that of the document."""
        self.faults.append(FieldError(self.written(path), with_value(reason, value)))


# Pipeline-wide settings: each stage has them unless it says otherwise.
FILE_WIDE: Final = (
    "dtype",
    "quantization",
    "trust_remote_code",
    "distributed_executor_backend",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "data_parallel_size",
    "pipeline_parallel_size",
)
PARALLEL: Final = frozenset(
    {*ParallelConfigSchema().fields, *BY_PLACE["parallel_config"], "sequence_parallel_size"}
)
_STAGE: Final = frozenset(StageSchema().fields) | BY_PLACE["stage"].keys()
_RUNTIME: Final = frozenset(RuntimeSchema().fields) | (
    BY_PLACE["runtime"].keys() - BY_PLACE["engine_args"].keys()
)

_FILE: Final = frozenset({*BY_PLACE["file"], *FILE_WIDE, "platforms"})
_FLAT: Final = frozenset(
    {
        *EngineArgsSchema().fields,
        *RuntimeSchema().fields,
        *BY_PLACE["engine_args"],
        *PARALLEL,
    }
)
RENAMED: Final = (
    ("runtime", "max_batch_size", "max_num_seqs"),
    ("engine_args", "max_batch_size", "max_num_seqs"),
    ("engine_args", "quantization_config", "quantization"),
    ("engine_args", "diffusion_quantization_config", "quantization"),
)


def translate(document: Mapping[Any, Any]) -> Translation:
    """Return the document in the reference dialect; what is malformed is left to the schemas."""
    dialect = _dialect(document)
    found = Translation(dialect, dict(document))
    if dialect != "reference":
        where = "stage_args" if dialect == "stage_args" else "stages"
        found.other = other_model(document, where)
        if found.other is not None:
            return found
    if dialect == "stage_args":
        found.document["stages"] = found.document.pop("stage_args")
        found.names["stages"] = "stage_args"
        _take_file_runtime(found)
    if dialect != "reference":
        _sift_file(found)
    entries = found.document.get("stages")
    if isinstance(entries, list):
        found.document["stages"] = [
            _stage(found, entry, f"stages[{index}]") if isinstance(entry, Mapping) else entry
            for index, entry in enumerate(entries)
        ]
    for name in FILE_WIDE if dialect == "deploy" else ():
        found.document.pop(name, None)
    return found


def _dialect(document: Mapping[Any, Any]) -> Dialect:
    if "stage_args" in document and "stages" not in document:
        return "stage_args"
    if not _FILE.isdisjoint(document):
        return "deploy"
    entries = document.get("stages")
    found = entries if isinstance(entries, list) else []
    stages = [entry for entry in found if isinstance(entry, Mapping)]
    nested = any("engine_args" in stage or "runtime" in stage for stage in stages)
    flat = any(not _FLAT.isdisjoint(stage) for stage in stages)
    return "deploy" if flat and not nested else "reference"


def _take_file_runtime(found: Translation) -> None:
    """The `runtime` beside `stage_args`: links between stages, of which there are none here."""
    runtime = found.document.pop("runtime", None)
    if not isinstance(runtime, Mapping):
        if runtime is not None:
            found.refuse("runtime", runtime, "is not a mapping; remove it")
        return
    for key, value in runtime.items():
        if key == "edges" and value:
            found.refuse("runtime.edges", value, BY_PLACE["file"]["edges"].why)
        elif key in {"edges", "enabled", "defaults", "connectors"}:
            found.ignored.append(f"runtime.{key}")
        else:
            found.refuse(f"runtime.{key}", value, "is an unknown key; remove it")


def _sift_file(found: Translation) -> None:
    _sift(found, found.document, "file", "")
    platforms = found.document.pop("platforms", None)
    if platforms is None:
        return
    if not isinstance(platforms, Mapping):
        found.refuse("platforms", platforms, "is not a mapping; remove it")
        return
    for name in platforms:
        if name == SERVED_PLATFORM and isinstance(platforms[name], Mapping):
            lay_over_stages(found.document, platforms[name].get("stages"))
        elif name in OTHER_PLATFORMS:
            found.ignored.append(f"platforms.{name}")
        else:
            reason = "is not supported; write its values into the stages"
            found.refuse(f"platforms.{name}", None, reason)


def _stage(found: Translation, entry: Mapping[Any, Any], path: str) -> dict[Any, Any]:
    stage = dict(entry)
    if found.dialect == "deploy":
        stage = unfold_stage(found, stage, path)
    if stage.get("stage_type") != "diffusion":
        return stage  # refused for its kind alone: most of its keys would be foreign
    _rename(found, stage, path)
    _sift(found, stage, "stage", path)
    for place in ("runtime", "engine_args"):
        if isinstance(stage.get(place), Mapping):
            stage[place] = dict(stage[place])
            if place == "engine_args":
                _refuse_eager_compiling(found, stage[place], f"{path}.{place}")
            _sift(found, stage[place], place, f"{path}.{place}")
    engine_args = stage.get("engine_args")
    if isinstance(engine_args, dict) and isinstance(engine_args.get("parallel_config"), Mapping):
        parallel = engine_args["parallel_config"] = dict(engine_args["parallel_config"])
        parallel_path = f"{path}.engine_args.parallel_config"
        _sift(found, parallel, "parallel_config", parallel_path)
        _drop_sequence_size(found, parallel, parallel_path)
    return stage


def _sift(found: Translation, section: dict[Any, Any], place: Place, path: str) -> None:
    """Take the foreign keys out of the section: listed or refused."""
    foreign = BY_PLACE[place]
    for key in [key for key in section if key in foreign]:
        value, where = section.pop(key), f"{path}.{key}" if path else key
        if not foreign[key].ignores(value):
            found.refuse(where, value, foreign[key].why)
        elif value is not None:
            found.ignore(where)


def _rename(found: Translation, stage: dict[Any, Any], path: str) -> None:
    """Put older names of engine arguments in the place of today's."""
    for place, old, new in RENAMED:
        section = stage.get(place)
        if not isinstance(section, Mapping) or old not in section:
            continue
        section = stage[place] = dict(section)
        value, old_path = section.pop(old), f"{path}.{place}.{old}"
        engine_args = stage.get("engine_args")
        if value is None or not isinstance(engine_args, Mapping):
            continue
        given = engine_args.get(new)
        if given is None:
            stage["engine_args"] = {**engine_args, new: value}
            found.names[f"{path}.engine_args.{new}"] = found.written(old_path)
        elif given != value:
            found.refuse(old_path, value, f"is the older name of {new}, which is {given}")


def _refuse_eager_compiling(found: Translation, engine_args: dict[Any, Any], path: str) -> None:
    """Where a file says both, vLLM-Omni does not compile, and this service would."""
    granularity = engine_args.get("diffusion_compile_granularity")
    if engine_args.get("enforce_eager") is True and granularity not in (None, "none"):
        reason = f"contradicts diffusion_compile_granularity ({granularity}); keep one"
        found.refuse(f"{path}.enforce_eager", engine_args.pop("enforce_eager"), reason)


def _drop_sequence_size(found: Translation, parallel: dict[Any, Any], path: str) -> None:
    """`sequence_parallel_size` says again what the two degrees say, or it is refused."""
    size = parallel.pop("sequence_parallel_size", None)
    if size is None:
        return
    ulysses, ring = parallel.get("ulysses_degree") or 1, parallel.get("ring_degree") or 1
    if isinstance(ulysses, int) and isinstance(ring, int) and size == ulysses * ring:
        found.ignore(f"{path}.sequence_parallel_size")
    else:
        reason = "is not ulysses_degree x ring_degree; write those two instead"
        found.refuse(f"{path}.sequence_parallel_size", size, reason)


_Sections = dict[str, dict[Any, Any]]


def unfold_stage(notes: Translation, entry: Mapping[Any, Any], path: str) -> dict[Any, Any]:
    """Return the stage in the reference's sections; a stage without a kind is a diffusion stage."""
    stage: dict[Any, Any] = {"stage_type": "diffusion"}
    sections: _Sections = {"runtime": {}, "engine_args": {}}
    for key in FILE_WIDE:
        if notes.document.get(key) is not None:
            _put(notes, sections, key, notes.document[key], (path, key))
    for key, value in entry.items():
        if key in _STAGE and key not in sections:
            stage[key] = value
        elif key not in sections and key != "parallel_config":
            _put(notes, sections, key, value, (path, f"{path}.{key}"))
    parallel = {"parallel_config": entry.get("parallel_config")}
    for section, values, where in (
        ("engine_args", parallel, path),
        ("runtime", entry.get("runtime"), f"{path}.runtime"),
        ("engine_args", entry.get("engine_args"), f"{path}.engine_args"),
    ):
        _lay_over(notes, sections, section, values, (path, where))
    _deal_template(notes, sections, path)
    return {**stage, **sections}


def _lay_over(
    notes: Translation, sections: _Sections, section: str, values: Any, places: tuple[str, str]
) -> None:
    """Lay a nested section over the flat keys; `places` are paths of the stage and the section."""
    path, where = places
    if values is not None and not isinstance(values, Mapping):
        notes.refuse(where, values, "is not a mapping; write its keys into the stage itself")
        return
    for key, value in (values or {}).items():
        written = f"{where}.{key}"
        if key == "parallel_config" and isinstance(value, Mapping):
            for inner, degree in value.items():
                _put_degree(notes, sections, inner, degree, (path, f"{written}.{inner}"))
        elif key == "parallel_config" and value is not None:
            notes.names[written] = written  # as it stands there, and not flat
            notes.refuse(written, value, "is not a mapping; write `key: value` lines beneath it")
        elif value is not None:
            _set(notes, sections[section], key, value, (f"{path}.{section}.{key}", written))


def _put(
    notes: Translation, sections: _Sections, key: Any, value: Any, places: tuple[str, str]
) -> None:
    """Put a flat key where the reference has it; `places` are the stage's path and the key's."""
    path, written = places
    if key in PARALLEL:
        _put_degree(notes, sections, key, value, places)
        return
    section = "runtime" if key in _RUNTIME else "engine_args"
    _set(notes, sections[section], key, value, (f"{path}.{section}.{key}", written))


def _put_degree(
    notes: Translation, sections: _Sections, key: Any, value: Any, places: tuple[str, str]
) -> None:
    path, written = places
    degrees = sections["engine_args"].setdefault("parallel_config", {})
    _set(notes, degrees, key, value, (f"{path}.engine_args.parallel_config.{key}", written))


def _set(
    notes: Translation, section: dict[Any, Any], key: Any, value: Any, places: tuple[str, str]
) -> None:
    """Set a key; a stage may differ from the whole file, and nothing may differ from itself."""
    place, written = places
    earlier = notes.names.get(place, "")
    if earlier.startswith("stages[") and section.get(key) not in (None, value):
        notes.names[place] = written
        notes.refuse(place, value, f"differs from {earlier}; keep one of the two")
        return
    if value is not None or key not in section:
        section[key] = value
        notes.names[place] = written


def _deal_template(notes: Translation, sections: _Sections, path: str) -> None:
    """Devices of one replica's length are a template: replica r has those r lengths further on."""
    runtime, replicas = sections["runtime"], sections["runtime"].get("num_replicas")
    numbers = _numbers(runtime.get("devices"))
    each = _devices_per_replica(sections["engine_args"].get("parallel_config"))
    if not isinstance(replicas, int) or replicas < 2 or numbers is None or len(numbers) != each:
        return
    if sorted(numbers) != list(range(each)):
        notes.refuse(
            f"{path}.runtime.devices",
            runtime["devices"],
            f"has the length of one replica ({each}), so it is a template for each of {replicas}; "
            f"write 0 to {each - 1}, each once, or all {replicas * each} devices",
        )
        del runtime["devices"]
        return
    runtime["devices"] = [
        replica * each + place for replica in range(replicas) for place in numbers
    ]


def _numbers(devices: Any) -> list[int] | None:
    """The device numbers, or None where they are not all numbers."""
    if isinstance(devices, bool):
        return None
    entries = str(devices).split(",") if isinstance(devices, str | int) else devices
    if not isinstance(entries, list):
        return None
    texts = [str(entry).strip() for entry in entries]
    return [int(text) for text in texts] if all(text.isdecimal() for text in texts) else None


def _devices_per_replica(parallel: Any) -> int:
    """What the schema makes of the degrees; 0 where it refuses them."""
    known = ParallelConfigSchema().fields
    served = {key: value for key, value in (parallel or {}).items() if key in known}
    try:
        size: int = ParallelConfigSchema().load(served).world_size
    except ValidationError:
        return 0
    return size
