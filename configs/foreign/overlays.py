"""Files of vLLM-Omni's deploy dialect that are laid over another file or for one kind of device."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from configs.errors import ConfigurationError, FieldError
from configs.fields import with_value

# Ours run on CUDA and CPU; a file's values for other kinds of device are for other machines.
OTHER_PLATFORMS: Final = frozenset({"npu", "xpu", "rocm", "musa", "hpu", "tpu"})
SERVED_PLATFORM: Final = "cuda"
_BASE: Final = "base_config"
_DEPTH: Final = 8


def with_base(path: Path, read: Callable[[Path], dict[Any, Any]]) -> dict[Any, Any]:
    """Return what a file says, laid over the file that its `base_config` names.

    Args:
        path: The file; `base_config` in it is relative to its folder.
        read: Reads one file.

    Raises:
        ConfigurationError: A file cannot be read, or the bases lead in a circle.
    """
    document, file = read(path), path
    for _ in range(_DEPTH):
        name = document.get(_BASE)
        if name is None:
            return {key: value for key, value in document.items() if key != _BASE}
        if not isinstance(name, str) or not (file.parent / name).is_file():
            fault = FieldError(_BASE, with_value(f"is no file in {file.parent.absolute()}", name))
            raise ConfigurationError.from_details([fault], f"{file} is refused")
        file = file.parent / name
        rest = {key: value for key, value in document.items() if key != _BASE}
        document = _laid(read(file), rest)
    raise ConfigurationError(
        f"{path}: base_config leads over more than {_DEPTH} files; write everything into one file"
    )


def lay_over_stages(document: dict[Any, Any], stages: Any) -> None:
    """Lay the entries of a list over the document's stages of the same `stage_id`.

    Entries for stages that the document does not have are for other files and left out.
    """
    known = {_number(stage) for stage in _list(document.get("stages"))}
    over = [stage for stage in _list(stages) if _number(stage) in known]
    if over:
        document["stages"] = _stages(document["stages"], over)


def _laid(base: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `over` on `base`: mappings key by key, stages by their number, the rest whole."""
    merged = dict(base)
    for key, value in over.items():
        earlier = merged.get(key)
        if key == "stages" and isinstance(earlier, list) and isinstance(value, list):
            merged[key] = _stages(earlier, value)
        elif isinstance(earlier, Mapping) and isinstance(value, Mapping):
            merged[key] = _laid(earlier, value)
        else:
            merged[key] = value
    return merged


def _stages(base: list[Any], over: list[Any]) -> list[Any]:
    merged, places = list(base), {_number(stage): place for place, stage in enumerate(base)}
    for stage in over:
        place = places.get(_number(stage))
        if place is None or not isinstance(stage, Mapping):
            merged.append(stage)
        else:
            merged[place] = _laid(merged[place], stage)
    return merged


def _number(stage: Any) -> int | None:
    number = stage.get("stage_id") if isinstance(stage, Mapping) else None
    return number if isinstance(number, int) else None


def _list(stages: Any) -> list[Any]:
    found = stages if isinstance(stages, list) else []
    return [stage for stage in found if _number(stage) is not None]
