"""Tells a folder of this machine from a hub id, and refuses a folder that holds no pipeline.

It looks at the file system only; whether a hub id exists is known to the hub alone, and is found
out when a replica loads it.
"""

import os.path
import re
from typing import Final

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z", re.ASCII)
_MEND: Final = (
    "give a diffusers folder (one with model_index.json) or a hub id such as Qwen/Qwen-Image"
)


def locate_model(value: str) -> str:
    """Return the absolute path of the folder that `value` names, or the hub id as it is.

    A path is relative to the current directory. Path is what begins with /, ./, ../ or ~, has no
    slash or more than one, or begins with the name of a folder that exists here.

    Raises:
        ValueError: With the reason, which begins with a verb: no such folder, or no pipeline in it.
    """
    if not _is_path(value):
        if _HUB_ID.match(value):
            return value
        raise ValueError(f"is neither a folder here nor a hub id; {_MEND}")
    # Not resolved: behind a link, the name as written is the model's name to clients.
    folder = os.path.abspath(os.path.expanduser(value))
    if not os.path.exists(folder):
        raise ValueError(f"is not there: {folder} does not exist; {_MEND}")
    if not os.path.isdir(folder):
        raise ValueError(f"is not a folder: {folder} is a file; {_MEND}")
    if not os.path.isfile(os.path.join(folder, "model_index.json")):
        raise ValueError(f"holds no pipeline: {folder} has no model_index.json; {_MEND}")
    return folder


def _is_path(value: str) -> bool:
    first, *rest = value.split("/")
    return (
        first in {"", ".", ".."} or value.startswith("~") or len(rest) != 1 or os.path.isdir(first)
    )
