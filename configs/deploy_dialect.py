"""One stage of a deploy file (vLLM-Omni 0.30), unfolded into the reference's sections.

The file is flat: what the reference has under `runtime` and `engine_args` stands in the stage
itself, and what holds for every stage at the top. Sections that are there all the same are laid
over the flat keys, as vLLM-Omni does. Knows no schema beyond its keys.
"""

from collections.abc import Mapping
from typing import Any, Final

from marshmallow import ValidationError

from configs.dialect_fields import BY_PLACE, Translation
from configs.stage_schema import ParallelConfigSchema, RuntimeSchema, StageSchema

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
        notes.refuse(place, value, f"is another value than that of {earlier}; keep one of the two")
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
            f"has the length of one replica ({each}), so that it is a template for each of "
            f"{replicas}: it must name the places 0 to {each - 1}, each once; or name all "
            f"{replicas * each} devices",
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
