"""The parts of a pipeline that LoRA adapters change: put in, taken out, set active.

Speaks to diffusers' LoRA loaders and PEFT, which keep what is active, and at which scale, inside
the modules. Does not know which request wants what, nor when the modules are kept still.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.loaders.lora_base import (
    disable_lora_for_text_encoder,
    enable_lora_for_text_encoder,
    set_adapters_for_text_encoder,
)

from configs.pipeline_settings import LoraSource
from workers.devices.device_chunk import denoisers

# Adapters by their names for PEFT, and the scale of each.
Scaled = tuple[tuple[str, float], ...]


class AdaptedParts:
    """The denoisers and text encoders of one pipeline."""

    def __init__(self, pipe: Any) -> None:
        """Find the parts; those of a family that takes no adapters are only never changed."""
        self._pipe = pipe
        self._text_active: Scaled | None = ()
        self._text_encoders: list[Any] = [
            part
            for name, part in pipe.components.items()
            if name.startswith("text_encoder") and isinstance(part, torch.nn.Module)
        ]

    def put_in(self, source: LoraSource, name: str) -> bool:
        """Load an adapter under a name that PEFT has never had; False where it changes no part.

        Raises:
            Exception: Whatever diffusers raises where it can not be read or does not fit; some of
                it may be in by then.
        """
        self._text_active = None
        options = {"weight_name": source.weight_name, "revision": source.revision}
        # Layers that are made in inference mode stay so, which quantized weights can not be in.
        with _quiet(), torch.inference_mode(mode=False), torch.no_grad():
            self._pipe.load_lora_weights(
                source.path,
                adapter_name=name,
                local_files_only=source.is_local,
                use_safetensors=True,
                **{key: value for key, value in options.items() if value is not None},
            )
        changed = [part for part in self._all() if _knows(part, name)]
        for part in changed:
            part.eval()  # its new layers are not
        return bool(changed)

    def take_out(self, name: str) -> None:
        """Remove all that is there of an adapter."""
        self._text_active = None
        with _quiet():
            self._pipe.delete_adapters([name])

    def set_denoisers(self, active: Scaled) -> None:
        """Have these adapters, of those that change a denoiser, count in its next forwards."""
        for denoiser in self._denoisers():
            if not getattr(denoiser, "peft_config", None):
                continue
            names, scales = _of(denoiser, active)
            if names:
                denoiser.enable_lora()
                denoiser.set_adapters(names, scales)
            else:
                denoiser.disable_lora()

    def set_text_encoders(self, active: Scaled) -> None:
        """Have these adapters, of those that change a text encoder, count in what it encodes."""
        if active == self._text_active:
            return
        self._text_active = None
        for encoder in self._text_encoders:
            if not getattr(encoder, "peft_config", None):
                continue
            names, scales = _of(encoder, active)
            if names:
                enable_lora_for_text_encoder(encoder)
                set_adapters_for_text_encoder(names, encoder, scales)
            else:
                disable_lora_for_text_encoder(encoder)
        self._text_active = active

    def changes_text(self, name: str) -> bool:
        """Whether an adapter changes a text encoder."""
        return any(_knows(encoder, name) for encoder in self._text_encoders)

    def text_dtypes(self) -> tuple[torch.dtype, ...]:
        """Return what the text encoders compute in: float32 for a run that did not fit in half."""
        return tuple(encoder.dtype for encoder in self._text_encoders)

    def _denoisers(self) -> Iterable[Any]:
        return denoisers(self._pipe).values()

    def _all(self) -> tuple[Any, ...]:
        return (*self._denoisers(), *self._text_encoders)


def _knows(part: Any, name: str) -> bool:
    return name in (getattr(part, "peft_config", None) or {})


def _of(part: Any, active: Scaled) -> tuple[list[str], list[float]]:
    """Those of `active` that change `part`: their names, and their scales."""
    here = [(name, scale) for name, scale in active if _knows(part, name)]
    return [name for name, _ in here], [scale for _, scale in here]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without PEFT's warnings that there are several adapters, and that one in use was removed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        yield
