"""What a model's folder lacks: parts to leave out, parts that are missed, all but one variant."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from configs.errors import ModelLoadFailed
from configs.stage_config import EngineArgs, ReplicaPlan
from workers.engine.loading.saved_parts import part_variants, read_index

logger = logging.getLogger(__name__)

# Parts without which diffusers' pipelines make the same picture of a text.
_OPTIONAL: Final = frozenset({"safety_checker", "feature_extractor", "image_encoder"})
# diffusers' StableDiffusion3Pipeline puts zeros in place of what its third encoder would say.
_THIRD: Final = frozenset({"text_encoder_3", "tokenizer_3"})


def left_out(args: EngineArgs, given: Iterable[str]) -> dict[str, Any]:
    """Return the parts to leave out of the pipeline, each with None.

    Args:
        args: Of the stage, with the model's folder.
        given: Parts that are loaded from elsewhere.

    Raises:
        ModelLoadFailed: The folder of a part that the pipeline needs is missing.
    """
    folder, found = Path(args.model), dict[str, Any]()
    index = read_index(folder)
    third = str(index.get("_class_name", "")).startswith("StableDiffusion3")
    for name, entry in index.items():
        if not isinstance(entry, list) or len(entry) != 2 or name.startswith("_") or name in given:
            continue
        if entry[0] is None:
            if third and name in _THIRD:
                found[name] = None
        elif isinstance(entry[1], str) and not (folder / name).is_dir():
            if name not in _OPTIONAL:
                raise ModelLoadFailed(
                    f"{args.model}: the folder of its part {name} is missing; download or copy the"
                    " model again"
                )
            logger.warning("%s: its folder has no %s, which is left out", args.model, name)
            found[name] = None
    return found


def with_variant(plan: ReplicaPlan) -> ReplicaPlan:
    """Return the plan with the variant of the weights where a part has no others, and say so."""
    args = plan.stage.engine_args
    if args.variant is not None:
        return plan
    folder = Path(args.model)
    only = set[str]()
    for name in read_index(folder):
        variants = part_variants(folder / name)
        if variants and None not in variants:
            only |= {each for each in variants if each is not None}
    if len(only) != 1:
        return plan
    (variant,) = only
    logger.warning(
        "%s: some of its parts have weights of the variant %s alone, which is used",
        args.model,
        variant,
    )
    args = replace(args, variant=variant)
    return replace(plan, stage=replace(plan.stage, engine_args=args))
