"""What in a stage file does not go together though each value is right, and the way to mend it.

Knows no schema; a fault is the text that stands behind the path of its key.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from configs.stage_config import StageConfig

DEGREES: Final = ("ulysses_degree", "ring_degree", "cfg_parallel_size")


def parallel_faults(data: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Keys of a `parallel_config` that do not go together, with the reasons."""
    degrees = {name: data[name] for name in DEGREES if data.get(name, 1) > 1}
    product = math.prod(degrees.values())
    world_size = data.get("world_size", product)
    if degrees and world_size != product:
        reason = (
            f"is not ulysses_degree x ring_degree x cfg_parallel_size, which is {product}; "
            "make them agree, or leave world_size out"
        )
        yield "world_size", [reason]
    if "device_map" in data and degrees:
        names = " and ".join(degrees)
        yield "device_map", [f"puts parts on devices, and {names} share each call; leave out one"]
    elif "device_map" in data and world_size < 2:
        yield "device_map", ["needs several devices; set world_size, or leave it out"]


def kind_fault(stage: Mapping[Any, Any]) -> str | None:
    """What is wrong with the kind of a stage, or None when it is a diffusion stage."""
    kind = stage.get("stage_type")
    if kind == "diffusion":
        return None
    if kind is None:
        return "is missing; write stage_type: diffusion, the only kind served here"
    runtime = stage.get("runtime")
    replicas = runtime.get("num_replicas") if isinstance(runtime, Mapping) else None
    mend = "take the stage out, or write stage_type: diffusion if its model is a diffusers pipeline"
    if replicas is not None and replicas != 1:  # it may be anything, a list too
        return (
            f"is not a diffusion stage and has runtime.num_replicas {replicas!r}: only diffusion "
            f"stages can have replicas, and no other kind is served here; {mend}"
        )
    return f"is not a diffusion stage, the only kind served here; {mend}"


def count_fault(devices: tuple[int, ...], replicas: int, each: int) -> str:
    """What is wrong with so many devices for replicas that have `each` of them."""
    found, needed = len(devices), replicas * each
    reason = (
        f"names {_counted(found, 'device')}, and exactly {needed} are needed: "
        f"{_counted(replicas, 'replica')} (runtime.num_replicas) x {_counted(each, 'device')} each "
        f"(engine_args.parallel_config.world_size); name {needed}"
    )
    if found % each == 0:
        return f"{reason}, or set num_replicas to {found // each}"
    return reason


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def twin_faults(stages: Sequence[StageConfig]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each stage that has the id or the model name of an earlier one, with the reasons."""
    for index, stage in enumerate(stages):
        faults: dict[str, Any] = {}
        for earlier, other in enumerate(stages[:index]):
            if stage.stage_id == other.stage_id:
                faults["stage_id"] = [
                    f"is already that of stages[{earlier}]; give each stage its own number"
                ]
            if stage.model_name == other.model_name:
                reason = (
                    f"makes {stage.model_name!r} the name of this model, as of stages[{earlier}]; "
                    "clients could not tell them apart; give one a served_model_name of its own"
                )
                named = stage.engine_args.served_model_name is not None
                faults["engine_args"] = {"served_model_name" if named else "model": [reason]}
        if faults:
            yield index, faults
