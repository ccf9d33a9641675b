"""What is in the file of an adapter: which one it is, what kind, and how many weights it has."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from configs.adapter_fields import LoraSource

ENDING: Final = ".safetensors"
# The file that diffusers writes into a folder of its own for each adapter, and those of PEFT.
USUAL_FILE: Final = "pytorch_lora_weights.safetensors"
PEFT_FILE: Final = "adapter_model.safetensors"
PEFT_CONFIG: Final = "adapter_config.json"
_PEFT_PREFIX: Final = "base_model.model."
# What stands for the matrix that leads back to the layer, in the names of all trainers.
_UP: Final = re.compile(r"(lora_B|lora_up|lora\.up|_lora\.up|lora_linear_layer\.up)(\.|$)")
_OF_TEXT: Final = ("text_encoder", "lora_te", "te1_", "te2_", "conditioner.")
# Kinds of which diffusers drops a part, or all, without an error.
_FOREIGN: Final = {"dora_scale": "DoRA of another trainer than diffusers", "hada_w": "LoHa"}


class UnreadableAdapter(Exception):
    """The adapter is none that this service can apply; the text says why."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """One file of weights.

    Attributes:
        path: Where it is.
        others: Further files of weights in its folder, which nobody named.
        peft: The configuration beside it where PEFT saved it; None for all others.
    """

    path: Path
    others: int = 0
    peft: Mapping[str, Any] | None = None

    @property
    def up_elements(self) -> int:
        """Numbers in the matrices that lead back to the layers; conversions keep their sum."""
        with safe_open(self.path, "pt") as file:
            return sum(
                math.prod(file.get_slice(key).get_shape())
                for key in file.keys()  # noqa: SIM118 - not a mapping
                if _UP.search(key)
            )

    @property
    def changes_text(self) -> bool:
        """Whether it has weights for a text encoder."""
        return any(key.startswith(_OF_TEXT) for key in self._keys())

    def refuse_foreign(self) -> None:
        """Refuse kinds that diffusers would apply in part.

        Raises:
            UnreadableAdapter: It is such a one.
        """
        if self.peft is not None:
            kind = "DoRA of PEFT" if self.peft.get("use_dora") else self.peft.get("peft_type")
            if kind not in {"LORA", None}:
                raise UnreadableAdapter(f"it is a {kind}, which is not supported; use a LoRA")
        for key in self._keys():
            for sign, kind in _FOREIGN.items():
                if sign in key:
                    raise UnreadableAdapter(f"it is a {kind}, which is not supported; use a LoRA")

    def weights(self, part: str) -> dict[str, torch.Tensor]:
        """Return the weights of a PEFT folder as those of a part of the pipeline.

        The scale (`lora_alpha` over the rank, or over its root for `use_rslora`) is multiplied in.
        """
        peft = self.peft or {}
        found = {}
        for key, value in load_file(self.path).items():
            name = key.removeprefix(_PEFT_PREFIX)
            if ".lora_B." in name and value.ndim > 1:
                module, rank = name.partition(".lora_B.")[0], value.shape[1]
                over = math.sqrt(rank) if peft.get("use_rslora") else rank
                value = value * (_alpha(peft, module, rank) / over)  # noqa: PLW2901
            found[f"{part}.{name}"] = value
        return found

    def _keys(self) -> list[str]:
        with safe_open(self.path, "pt") as file:
            return list(file.keys())


def _alpha(peft: Mapping[str, Any], module: str, rank: int) -> float:
    """The `lora_alpha` of a module; PEFT reads its patterns as ends of the name."""
    for pattern, alpha in (peft.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(alpha)
    return float(peft.get("lora_alpha") or rank)


def found_file(source: LoraSource) -> AdapterFile | None:
    """Return the file of an adapter on this machine; None for what comes from the hub.

    Of several that nobody chose among it is diffusers' own, else the first by name.

    Raises:
        UnreadableAdapter: The folder has none, or `adapter_config.json` cannot be read.
    """
    if not source.is_local:
        return None
    folder = Path(source.path)
    names = sorted(path.name for path in folder.glob(f"*{ENDING}"))
    name = source.weight_name
    others = 0
    if name is None:
        usual = [each for each in (USUAL_FILE, PEFT_FILE) if each in names]
        if not names:
            raise UnreadableAdapter(f"{folder} holds no {ENDING} file")
        name, others = (*usual, *names)[0], len(names) - 1
    peft = None
    if name == PEFT_FILE and (folder / PEFT_CONFIG).is_file():
        try:
            peft = json.loads((folder / PEFT_CONFIG).read_text())
        except ValueError as error:
            raise UnreadableAdapter(f"{PEFT_CONFIG} is no JSON: {error}") from None
    return AdapterFile(folder / name, others, peft)
