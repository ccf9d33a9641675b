"""Texts of different lengths made equally long, where a mask says what of them is text.

Only by the names of a text and its mask (``workers.denoiser.argument_rules``), and only in calls
that name the mask, be it with None, which means that all is text. Masks are True or 1 for what
counts, as diffusers has them; one of fractions may be something else, and its text is left as it
is. Does not know how a family reads its mask: the first padded forward of a kind has to prove
itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from workers.denoiser.argument_rules import TEXT_MASKS


def texts_to_pad(arguments: Mapping[str, Any], rows: int) -> dict[str, str]:
    """Return the texts of a call that may be made longer, each with the name of its mask.

    A text is `[rows, length, channels]`, a mask `[rows, length]` of truth values or whole numbers.
    """
    named = [mask for mask in TEXT_MASKS if mask in arguments]
    texts = [TEXT_MASKS[mask] for mask in named]
    return {
        text: mask
        for text, mask in zip(texts, named, strict=True)
        if texts.count(text) == 1 and _fit(arguments.get(text), arguments[mask], rows)
    }


def pad_texts(calls: Sequence[Mapping[str, Any]], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the calls with these texts as long as the longest of each, and masks that say so.

    Texts that are equally long and all without a mask, or all with one, stay as they are.
    """
    padded = [dict(call) for call in calls]
    for text, mask in texts.items():
        lengths = [call[text].shape[1] for call in calls]
        masks = [call[mask] for call in calls]
        with_mask = [each for each in masks if each is not None]
        if len(set(lengths)) == 1 and len(with_mask) in (0, len(calls)):
            continue
        dtype = with_mask[0].dtype if with_mask else torch.bool
        for call, length in zip(padded, lengths, strict=True):
            own, missing = call[mask], max(lengths) - length
            if own is None:
                own = torch.ones(call[text].shape[:2], dtype=dtype, device=call[text].device)
            call[text] = pad(call[text], (0, 0, 0, missing))
            call[mask] = pad(own, (0, missing))
    return padded


def _fit(text: Any, mask: Any, rows: int) -> bool:
    if not torch.is_tensor(text) or text.ndim != 3 or text.shape[0] != rows:
        return False
    if mask is None:
        return True
    return (
        torch.is_tensor(mask)
        and mask.shape == text.shape[:2]
        and mask.device == text.device
        and not (mask.is_floating_point() or mask.is_complex())
    )
