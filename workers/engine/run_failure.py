"""What a client is told of a run that failed. Knows no pipelines."""

from configs.errors import DeviceLost, GenerationError, GenerationFailed, OutOfMemory
from routing.parameters import Parameters
from workers.denoiser.failure_cause import is_out_of_memory, short_cause
from workers.devices.device_faults import is_device_lost


def run_failure(error: Exception, parameters: Parameters, device: str) -> GenerationError:
    """Return the error of the service for what a pipeline raised on a device of that type."""
    if is_device_lost(error, device):
        return DeviceLost(f"the device answers no more: {short_cause(error)}")
    if is_out_of_memory(error):
        size = f"{parameters.num_outputs_per_prompt} x {parameters.width}x{parameters.height}"
        if parameters.num_frames is not None:
            size += f" with {parameters.num_frames} frames"
        return OutOfMemory(f"too little memory for {size}; ask for a smaller size or fewer outputs")
    mend = ""
    if isinstance(error, NameError):  # diffusers leaves out what it can not import
        mend = "; a library that this pipeline needs is missing, such as torchvision (Cosmos)"
    return GenerationFailed(f"the pipeline failed: {short_cause(error)}{mend}")
