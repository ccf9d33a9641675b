"""Brings a model of the hub onto this host, once for all replicas, and says how far it is.

Which files those are is left to diffusers; huggingface_hub keeps each that is complete, and goes on
within one whose connection breaks. Replicas of one HF_HOME take turns by a lock on a file in it,
which the kernel opens when its holder dies; that file says how far the holder is.
"""

import fcntl
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import diffusers
import huggingface_hub
from diffusers.pipelines import pipeline_utils
from huggingface_hub import DryRunFileInfo, HfApi, ModelInfo, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils.tqdm import tqdm

from configs.errors import ModelLoadFailed
from configs.stage_config import EngineArgs
from workers.devices.weights import DENOISERS
from workers.failures import short_cause
from workers.patches import patched

_logger = logging.getLogger(__name__)

_INDEX: Final = "model_index.json"
_LOOK_S: Final = 0.5
_NOTE_EVERY_S: Final = 0.5
_UNITS: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_WAITING: Final = "waiting for the download by another process"
_BUSY: Final = 429
_SERVER_ERROR: Final = 500


class Tell(Protocol):
    """Learns what a replica does while it loads."""

    def __call__(self, activity: str, done: int | None = None, total: int | None = None) -> None:
        """Learn it in words; `done` and `total` are bytes of a download."""


def untold(activity: str, done: int | None = None, total: int | None = None) -> None:
    """Tell nobody."""


def fetch(args: EngineArgs, tell: Tell) -> Path:
    """Return the folder of the hub model `args.model`, once all that a pipeline loads is in it.

    Where the hub cannot be reached it is what the cache has.

    Raises:
        ModelLoadFailed: It is not a pipeline, or the disk has too little room for it.
        Exception: Those of huggingface_hub and diffusers.
    """
    with _turn(_lock_file(args.model), tell) as note:
        info = _ask_hub(args)
        if info is not None:
            _check_is_pipeline(args.model, info)
        options: dict[str, Any] = {"revision": args.revision, "local_files_only": info is None}
        replaced = _replaced(args, options)
        told = _told_snapshots(args.model, _Progress(tell, note))
        untyped: Any = diffusers.DiffusionPipeline
        with patched(pipeline_utils, "snapshot_download", told, over=True):
            folder = untyped.download(
                args.model, variant=args.variant, **options, **dict.fromkeys(replaced, True)
            )
        for name in replaced:  # its weights come from a file of their own, what it is from here
            huggingface_hub.hf_hub_download(args.model, f"{name}/config.json", **options)
        return Path(folder)


def _ask_hub(args: EngineArgs) -> ModelInfo | None:
    """What the hub says of the model; None where it does not answer."""
    try:
        return HfApi().model_info(args.model, revision=args.revision)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status < _SERVER_ERROR and status != _BUSY:
            raise
        why = short_cause(error)
    except HFValidationError:
        raise
    except Exception as error:  # noqa: BLE001 - those of the network are of several libraries
        why = short_cause(error)
    _logger.warning("%s: the hub does not answer, so the cache has to do: %s", args.model, why)
    return None


def _replaced(args: EngineArgs, options: dict[str, Any]) -> list[str]:
    """Parts whose weights the stage gives, so that those of the model are not needed."""
    wanted = args.pipeline.quantization
    if wanted is None or wanted.gguf_file is None:
        return []
    index = json.loads(
        Path(huggingface_hub.hf_hub_download(args.model, _INDEX, **options)).read_text()
    )
    return [name for name in wanted.components or DENOISERS if name in index]


def _check_is_pipeline(model: str, info: ModelInfo) -> None:
    files = [file.rfilename for file in info.siblings or ()]
    if _INDEX in files:
        return
    base = info.card_data.base_model if info.card_data is not None else None
    base = base[0] if isinstance(base, list) and base else base
    pipeline = f"{base or 'the pipeline that it was made from'}"
    weights = [file for file in files if file.endswith((".safetensors", ".ckpt", ".bin"))]
    gguf = next((file for file in files if file.endswith(".gguf")), None)
    if gguf is not None:
        fix = (
            f"its files are quantized weights: give {pipeline} as model, download one of them"
            f" (hf download {model} {gguf}) and name it in engine_args.quantization.gguf_file"
        )
    elif _is_adapter(info, weights):
        fix = f"it is an adapter: give {pipeline} as model, and this id in engine_args.lora_modules"
    elif "config.json" in files:
        fix = f"it is one part of a pipeline: give {pipeline} as model"
    elif weights:
        fix = (
            f"{weights[0]} is a single checkpoint: save it as a pipeline by diffusers'"
            " from_single_file and save_pretrained, and give that folder as model"
        )
    else:
        fix = "give one that has that file, such as Qwen/Qwen-Image"
    raise ModelLoadFailed(
        f"{model}: this is not a diffusers pipeline: it has no {_INDEX}; {fix}", lasting=True
    )


def _is_adapter(info: ModelInfo, weights: Sequence[str]) -> bool:
    tags = {tag.lower() for tag in info.tags or ()}
    return (
        bool(tags & {"lora", "peft"})
        or any(tag.startswith("base_model:adapter:") for tag in tags)
        or any("lora" in file.lower() for file in weights)
    )


class _Progress:
    """Bytes that are there of those that are needed; counted by several threads."""

    def __init__(self, tell: Tell, note: TextIO | None) -> None:
        self._tell = tell
        self._note = note
        self._lock = threading.Lock()
        self._noted_at = 0.0
        self.done = 0
        self.total = 0

    def expect(self, done: int, total: int) -> None:
        with self._lock:
            self.done, self.total = done, total
        self.add(0)

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
            done = min(self.done, self.total)
            self._tell(f"downloading {in_bytes(done, self.total)}", done, self.total)
            now = time.monotonic()
            if self._note is not None and now - self._noted_at >= _NOTE_EVERY_S:
                self._noted_at = now
                self._note.truncate(0)
                self._note.write(json.dumps([done, self.total]))
                self._note.flush()


def in_bytes(done: int, total: int) -> str:
    """Return both in the unit that suits the larger: `14.2 of 57.7 GB`."""
    size, unit = next((each for each in _UNITS if total >= each[0]), _UNITS[-1])
    return f"{done / size:.1f} of {total / size:.1f} {unit}"


def _told_snapshots(model: str, progress: _Progress) -> Callable[..., Any]:
    """Return what stands in for `snapshot_download`: it looks at the disk first, and counts."""

    def snapshot_download(repo: str, **options: Any) -> Any:
        if options.get("local_files_only"):
            return huggingface_hub.snapshot_download(repo, **options)
        files: list[DryRunFileInfo]
        files = huggingface_hub.snapshot_download(repo, **options, dry_run=True)
        total = sum(file.file_size or 0 for file in files)
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        _check_room(model, missing)
        progress.expect(total - missing, total)
        return huggingface_hub.snapshot_download(repo, **options, tqdm_class=_bar_class(progress))

    return snapshot_download


def _check_room(model: str, missing: int) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise ModelLoadFailed(
            f"{model}: {missing / 1e9:.1f} GB are to be downloaded to {cache}, where"
            f" {free / 1e9:.1f} GB are free; free space, or set HF_HOME to a folder on a larger"
            " disk",
            lasting=True,
        )


def _bar_class(progress: _Progress) -> type[tqdm]:
    """Return the class of the bars of one download, which show nothing and count bytes."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            # Of the two bars over all files, this is the one of what has been written to disk.
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            untyped: Any = super()
            untyped.__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                progress.add(int(n))
            return super().update(n)

    return Bar


def _lock_file(model: str) -> Path:
    folder = f"models--{model.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE) / ".locks" / folder / "replicas.lock"


@contextmanager
def _turn(file: Path, tell: Tell) -> Iterator[TextIO | None]:
    """Wait until no other process downloads the model; yields the file in which to say how far.

    None where the cache cannot be written to: what is read from it is complete or an error.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("a+", encoding="utf-8")
    except OSError as error:
        _logger.info("%s: replicas do not take turns: %s", file, error)
        yield None
        return
    with opened:
        while not _is_ours(opened):
            tell(*_of_other(opened))
            time.sleep(_LOOK_S)
        opened.truncate(0)
        yield opened


def _is_ours(opened: TextIO) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks; huggingface_hub loads twice, not wrong
        _logger.info("replicas do not take turns: %s", error)
    return True


def _of_other(opened: TextIO) -> tuple[str, int | None, int | None]:
    opened.seek(0)
    try:
        done, total = json.loads(opened.read())
    except ValueError:  # it has not begun, or is writing just now
        return _WAITING, None, None
    return _WAITING, done, total
