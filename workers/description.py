"""What a file says about how it was made: the fields that make the output again.

No time, host, request or replica is among them. Knows no file format.
"""

from routing.parameters import Parameters
from routing.tasks import TEXT_TO_IMAGE

Fields = dict[str, str | int | float]


def describe(
    parameters: Parameters,
    seed: int,
    model: str,
    size: tuple[int, int],
    scheduler: str | None = None,
) -> Fields:
    """Return the fields to write into a file; what was not asked for is left out.

    Args:
        parameters: How it was made.
        seed: Seed that makes this output alone.
        model: Name by which clients ask for the model.
        size: Width and height of what was made, pixels.
        scheduler: The noise scheduler that ran; None for the one that was asked for.
    """
    fields: dict[str, str | int | float | None] = {
        "task": None if parameters.task == TEXT_TO_IMAGE else parameters.task,
        "prompt": parameters.prompt,
        "negative_prompt": parameters.negative_prompt,
        "seed": seed,
        "num_inference_steps": parameters.num_inference_steps,
        "guidance_scale": parameters.guidance_scale,
        "true_cfg_scale": parameters.true_cfg_scale,
        "strength": parameters.strength,
        "scheduler": scheduler or parameters.scheduler,
        "lora": ", ".join(f"{each.name} {each.scale:g}" for each in parameters.lora) or None,
        "width": size[0],
        "height": size[1],
        "num_frames": parameters.num_frames,
        "fps": parameters.fps,
        "model": model,
    }
    return {name: value for name, value in fields.items() if value is not None}
