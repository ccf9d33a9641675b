"""Which requests may start together as one pipeline call, and the arguments of that call.

Every output of each request is one prompt of the call, with its own images and generator, so that
requests of different numbers of outputs go together. Knows names of diffusers' arguments, and no
request that runs.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from routing.parameters import Parameters
from routing.tasks import FROM_IMAGE_TASKS
from workers.engine.inputs import Inputs
from workers.engine.pipeline_arguments import (
    ONE_IMAGE_FOR_ALL,
    arguments_of,
    call_arguments,
    is_edit,
)
from workers.engine.seat import Seat

# Given as a list, one for each output; anything else is equal for all requests of a company.
_OF_EACH = ("prompt", "negative_prompt", "image", "mask_image")
# What a pipeline does not see of a request, or sees as one of `_OF_EACH`.
_OWN = {
    "prompt": "",
    "seed": 0,
    "num_outputs_per_prompt": 1,
    "image": (),
    "mask_image": None,
    "output_format": "png",
    "output_compression": None,
    "preview": False,
}


def takes_company(task: str, pipeline_class: Any) -> bool:
    """Tell whether one call of the pipeline may get an image for each of several requests."""
    return task not in FROM_IMAGE_TASKS or not pipeline_class.__name__.startswith(ONE_IMAGE_FOR_ALL)


def company_of(parameters: Parameters, inputs: Inputs, pipeline_class: Any) -> Hashable:
    """Return what requests have in common that may start together; None where it starts alone."""
    images = len(inputs.images)
    # A list of images is then those of one prompt.
    if parameters.deterministic or images > 1:
        return None
    negative = None if parameters.negative_prompt is None else ""
    # Those that start from the pixels get every image in the size of the output.
    own_size = bool(images) and is_edit(arguments_of(pipeline_class))
    size = inputs.images[0].size if own_size else None
    common = parameters.with_changes({**_OWN, "negative_prompt": negative})
    return common, images, inputs.mask is not None, size


def company_arguments(seats: Sequence[Seat], pipeline_class: Any) -> dict[str, Any]:
    """Return the arguments of one call for requests of one company, of a pipeline of that class."""
    if len(seats) == 1:
        return call_arguments(seats[0].parameters, pipeline_class, seats[0].inputs)
    calls: list[dict[str, Any]] = []
    for seat in seats:
        single = seat.parameters.with_changes({"num_outputs_per_prompt": 1})
        calls += [call_arguments(single, pipeline_class, seat.inputs)] * seat.outputs
    joint = dict(calls[0])
    for name in _OF_EACH:
        if name in joint:
            joint[name] = [call[name] for call in calls]
    joint["generator"] = [
        torch.Generator("cpu").manual_seed(seed)
        for seat in seats
        for seed in seat.parameters.seeds()
    ]
    return joint
