"""The dialects of stage files, all turned into the reference's before any schema sees them.

    reference    stages: [{stage_id, stage_type, runtime: {...}, engine_args: {...}}]
    stage_args   the same under `stage_args`, with a `runtime` of the whole file beside it
    deploy       stages: [{stage_id, devices, num_replicas, max_num_seqs, ...}], flat, of 0.30

Keys that the service does not have are taken out: listed where they change nothing, refused by name
where they would. Every path in a message is the one that stands in the file. Knows the schemas'
keys; checks no value of them.
"""

from collections.abc import Mapping
from typing import Any, Final

from configs.deploy_dialect import FILE_WIDE, PARALLEL, unfold_stage
from configs.dialect_fields import BY_PLACE, Dialect, Place, Translation
from configs.stage_schema import EngineArgsSchema, RuntimeSchema

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


# Ours run on CUDA and CPU; a file's values for other kinds of device are for other machines.
_OTHER_PLATFORMS: Final = frozenset({"npu", "xpu", "rocm", "musa", "hpu", "tpu"})


def translate(document: Mapping[Any, Any]) -> Translation:
    """Return the document in the reference dialect; what is malformed is left to the schemas."""
    dialect = _dialect(document)
    found = Translation(dialect, dict(document))
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
            found.refuse("runtime", runtime, "is not a mapping; take it out")
        return
    for key, value in runtime.items():
        if key == "edges" and value:
            found.refuse("runtime.edges", value, BY_PLACE["file"]["edges"].why)
        elif key in {"edges", "enabled", "defaults", "connectors"}:
            found.ignored.append(f"runtime.{key}")
        else:
            found.refuse(f"runtime.{key}", value, "is unknown here; take it out")


def _sift_file(found: Translation) -> None:
    _sift(found, found.document, "file", "")
    platforms = found.document.pop("platforms", None)
    if platforms is None:
        return
    if not isinstance(platforms, Mapping):
        found.refuse("platforms", platforms, "is not a mapping; take it out")
        return
    for name in platforms:
        if name in _OTHER_PLATFORMS:
            found.ignored.append(f"platforms.{name}")
        else:
            reason = "is not laid over the stages here; write its values into the stages themselves"
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
        reason = f"forbids what diffusion_compile_granularity ({granularity}) asks for; keep one"
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
        reason = "is not ulysses_degree x ring_degree; write those, and leave this one out"
        found.refuse(f"{path}.sequence_parallel_size", size, reason)
