"""Tells an error of one run from the loss of the device: a CUDA context that is poisoned.

After an illegal address, a failed device-side assert or the like, every later CUDA call of the
process fails, whoever makes it; only a new process helps. Knows no pipeline.
"""

import torch

from workers.denoiser.failure_cause import is_out_of_memory


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
