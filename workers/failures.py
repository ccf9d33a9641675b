"""What failed in torch or diffusers: out of memory, a lost device, or the cause in one line."""

from textwrap import shorten

import torch

from configs.errors import DeviceLost, GenerationError, GenerationFailed, OutOfMemory
from configs.parameters import Parameters

# Characters of a cause.
_CAUSE = 240


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether a device or the host had too little memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return any(sign in text for sign in ("out of memory", "can't allocate memory", "alloc_failed"))


def short_cause(error: BaseException) -> str:
    """Return an error as one line: its class and the beginning of its text.

    Where the first line only announces the next (torch names shapes that do not fit there), both.
    """
    lines = str(error).strip().splitlines() or [""]
    shown = lines[:2] if lines[0].endswith(":") else lines[:1]
    text = " ".join(shorten(line, _CAUSE, placeholder=" …") for line in shown)
    return f"{type(error).__name__}: {text}".rstrip(" :.")


def is_device_lost(error: BaseException, device: str) -> bool:
    """Tell whether no later call on the process's devices can succeed.

    On `cuda` the devices that this process works on are asked, whatever the error was: the run that
    meets a poisoned context may do so by an error of any kind, and many CUDA errors poison nothing
    (an invalid launch configuration, a kernel that is missing). Elsewhere there is nothing to ask,
    and an error of the class that torch has for devices is believed; never a text, which may repeat
    a client's words.
    """
    if device == "cuda":
        return not _devices_answer()
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def _devices_answer() -> bool:
    try:
        for device in range(torch.cuda.device_count()):
            # A device of another rank may have no memory left for a context of this process.
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def run_failure(error: Exception, parameters: Parameters, device: str) -> GenerationError:
    """Return the error of the service for what a pipeline raised on a device of that type."""
    if is_device_lost(error, device):
        return DeviceLost(f"the device no longer answers: {short_cause(error)}")
    if is_out_of_memory(error):
        size = f"{parameters.num_outputs_per_prompt} x {parameters.width}x{parameters.height}"
        if parameters.num_frames is not None:
            size += f" with {parameters.num_frames} frames"
        return OutOfMemory(f"too little memory for {size}; ask for a smaller size or fewer outputs")
    fix = ""
    if isinstance(error, NameError):  # diffusers leaves out what it cannot import
        fix = "; a library that this pipeline needs is missing, such as torchvision (Cosmos)"
    return GenerationFailed(f"the pipeline failed: {short_cause(error)}{fix}")
