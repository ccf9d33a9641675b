"""What the files of a pipeline say of its parts before any weight is read."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

_INDEX: Final = "model_index.json"
_LIBRARIES: Final = frozenset({"diffusers", "transformers"})
_SHARD: Final = re.compile(r"-\d+-of-\d+")


@dataclass(frozen=True)
class SavedPart:
    """A part of a pipeline that has weights.

    Attributes:
        name: Its name in the pipeline, and that of its folder.
        library: `diffusers` or `transformers`.
        kind: Its class there.
        config: What its configuration file says; classes may have defaults beyond it.
        numbers: How many numbers of each type its safetensors files have, by the names of the
            format: `F32`, `F16`, `BF16`.
        opaque_bytes: Size of its weights in files of which no type is told without reading them.
    """

    name: str
    library: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    opaque_bytes: int = 0

    @property
    def main_type(self) -> str | None:
        """The type of most of its numbers; None where the files do not tell."""
        return max(self.numbers, key=lambda each: self.numbers[each]) if self.numbers else None


def read_index(folder: Path) -> dict[str, Any]:
    """Return the entries of model_index.json; none where there is no such file."""
    return _read_json(folder / _INDEX)


def read_config(folder: Path, part: str) -> dict[str, Any]:
    """Return the configuration of a part; empty where it has none."""
    for name in ("config.json", "scheduler_config.json"):
        config = _read_json(folder / part / name)
        if config:
            return config
    return {}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a valid JSON file: {error}") from error
    return read


def read_parts(folder: Path, variant: str | None = None) -> dict[str, SavedPart]:
    """Return the parts with weights in a pipeline's folder, by their names.

    `variant` is that of the weights, where a part has it.

    Raises:
        safetensors.SafetensorError: A file is damaged.
        ValueError: A file of a configuration is.
    """
    found = {}
    for name, entry in read_index(folder).items():
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in _LIBRARIES):
            continue
        files = weight_files(folder / name, variant)
        if files:
            numbers, opaque = _contents(files)
            config = read_config(folder, name)
            found[name] = SavedPart(name, entry[0], entry[1], config, numbers, opaque)
    return found


def weight_files(folder: Path, variant: str | None = None) -> list[Path]:
    """Return the files from which a part is loaded, as diffusers and transformers choose them.

    That is safetensors before pickles, the variant before the others, and what an index lists
    before a whole file.
    """
    for ending in (".safetensors", ".bin"):
        files = sorted(folder.glob(f"*{ending}"))
        chosen = [file for file in files if _variant(file) == variant]
        chosen = chosen or [file for file in files if _variant(file) is None]
        sharded = [file for file in chosen if _SHARD.search(file.name)]
        if chosen:
            return sharded if sharded and any(folder.glob("*.index*.json")) else chosen
    return []


def part_variants(folder: Path) -> set[str | None]:
    """Return the variants of a part's safetensors weights; None among them is that of no name.

    Empty where there are pickles too, from which the part could be loaded without a variant.
    """
    if any(_variant(file) is None for file in folder.glob("*.bin")):
        return set()
    return {_variant(file) for file in folder.glob("*.safetensors")}


def _variant(file: Path) -> str | None:
    """What stands between the name and its ending: `model.fp16.safetensors`."""
    _, _, variant = _SHARD.sub("", file.stem).partition(".")
    return variant or None


def _contents(files: list[Path]) -> tuple[dict[str, int], int]:
    numbers, opaque = Counter[str](), 0
    for file in files:
        if file.suffix != ".safetensors":
            opaque += file.stat().st_size
            continue
        untyped: Any = safe_open
        with untyped(file, framework="pt") as saved:
            for name in saved.keys():  # noqa: SIM118 - it is no mapping
                tensor, size = saved.get_slice(name), 1
                for length in tensor.get_shape():
                    size *= length
                numbers[tensor.get_dtype()] += size
    return dict(numbers), opaque
