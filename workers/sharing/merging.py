"""How calls of a denoiser become one call and its output theirs, and how a call is cut."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from workers.sharing.argument_rules import (
    ALIKE,
    BY_FRAME,
    BY_ROW,
    BY_SECOND,
    DICTS,
    LAYERS,
    NUMBERS,
    POSITION_ROWS,
    SAMPLES,
    SHARED,
    TEXT_MASKS,
    TIMES,
)


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


Form = Literal["tensor", "list"]


Arguments = Mapping[str, Any]


# Dimensions of positions that each sample has a row of.
_OF_EACH = 3


# Dimensions of a sample that is a video: channels, frames, height, width.
_OF_VIDEO = 4


_WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)


class Unmergeable(Exception):
    """An argument or output that no rule fits; such a call runs alone.

    Attributes:
        name: The argument's.
    """

    def __init__(self, name: str) -> None:
        """Name what did not fit."""
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class _Shape:
    """How many samples a call has, how they are passed, and how many frames each has, if any."""

    rows: int
    form: Form
    frames: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a call decides with which others it can be merged.

    Attributes:
        rows: Samples in it.
        form: How they are passed.
        device: Where they are.
        signature: Calls of equal signatures merge, if their shared arguments are equal.
        lengths: Of the texts that are made longer where calls of other lengths merge with it.
    """

    rows: int
    form: Form
    device: torch.device
    signature: Hashable
    lengths: tuple[int, ...] = ()


def layout(arguments: Arguments) -> Layout:
    """Describe a call by its arguments; raises Unmergeable for one that no rule fits."""
    name = next((name for name in SAMPLES if arguments.get(name) is not None), "sample")
    sample = arguments.get(name)
    form: Form = "tensor"
    if torch.is_tensor(sample) and sample.ndim > 1:
        rows, device, size = sample.shape[0], sample.device, sample.shape[1:]
    elif isinstance(sample, (list, tuple)) and sample and all(map(torch.is_tensor, sample)):
        if len({each.shape for each in sample}) > 1:
            raise Unmergeable(name)
        form = "list"
        rows, device, size = len(sample), sample[0].device, sample[0].shape
    else:
        raise Unmergeable(name)
    texts = texts_to_pad(arguments, rows) if form == "tensor" else {}
    masks = set(texts.values())
    frames = size[1] if len(size) == _OF_VIDEO else None
    shape = _Shape(rows, form, frames)
    parts = [
        (key, _text_part(value) if key in texts else _understood(key, value, shape))
        for key, value in sorted(arguments.items())
        if key not in masks
    ]
    signature = form, tuple(size), tuple(parts), tuple(sorted(texts.items()))
    return Layout(
        rows, form, device, signature, tuple(arguments[text].shape[1] for text in sorted(texts))
    )


def merge(calls: Sequence[Arguments], rows: Sequence[int]) -> dict[str, Any]:
    """Merge calls of equal signatures, which have so many rows; raises Unmergeable."""
    calls = pad_texts(calls, texts_to_pad(calls[0], rows[0]))
    return {name: _merge(name, [call[name] for call in calls], rows) for name in calls[0]}


def split(output: Any, rows: Sequence[int], form: Form) -> list[Any]:
    """Give each call its rows of the merged output; raises Unmergeable where they are not there."""
    if type(output) is tuple:
        items = [_split(item, rows, form) for item in output]
        return [tuple(item[index] for item in items) for index in range(len(rows))]
    if isinstance(output, dict):
        named = {name: _split(item, rows, form) for name, item in output.items()}
        make: Any = type(output)
        return [
            make(**{name: item[index] for name, item in named.items()})
            for index in range(len(rows))
        ]
    return _split(output, rows, form)


def _understood(name: str, value: Any, shape: _Shape) -> Hashable:
    """The part of the signature that `value` is, be it whatever it may."""
    try:
        part = _part(name, value, shape)
        hash(part)
    except (TypeError, ValueError, RuntimeError) as error:  # what cannot be compared or ordered
        raise Unmergeable(name) from error
    return part


def _part(name: str, value: Any, shape: _Shape) -> Hashable:
    """The part of the signature that `value` is."""
    if torch.is_tensor(value):
        return _tensor_part(name, value, shape)
    if isinstance(value, dict) and (not value or name in DICTS):
        return tuple((key, _part(key, value[key], shape)) for key in sorted(value))
    if isinstance(value, (list, tuple)):
        return _list_part(name, value, shape)
    if value is None or isinstance(value, (bool, str, torch.dtype)):
        return type(value), value
    if isinstance(value, (int, float)) and name in NUMBERS:
        return type(value), value
    raise Unmergeable(name)


def _text_part(text: torch.Tensor) -> Hashable:
    return "text", text.dtype, text.device, text.shape[2]


def _tensor_part(name: str, value: torch.Tensor, shape: _Shape) -> Hashable:
    rows, form = shape.rows, shape.form
    kind = value.dtype, value.device
    if name in TIMES and value.ndim < 2 and value.numel() in (1, rows):
        # Some noise schedulers count in whole numbers; together they become float32, exactly.
        return "times", value.device, "wide" if value.dtype in _WIDE else value.dtype
    by_row = value.ndim > 0 and value.shape[0] == rows
    if name in TIMES | BY_ROW and by_row and form == "tensor":
        return "rows", kind, tuple(value.shape[1:])
    if name in BY_FRAME and shape.frames and value.shape[:1] == (rows * shape.frames,):
        return "frames", kind, shape.frames, tuple(value.shape[1:])
    if name in BY_SECOND and value.ndim > 1 and value.shape[1] == rows and form == "tensor":
        return "second", kind, value.shape[0], tuple(value.shape[2:])
    # Flux 2 has a row of positions for each sample and reads the first alone.
    if name in POSITION_ROWS and (value.ndim < 3 or (value.ndim == 3 and by_row)):
        return "shared", kind, value.ndim, tuple(value.shape[-2:])
    if name in SHARED - POSITION_ROWS:
        return "shared", kind, tuple(value.shape)
    raise Unmergeable(name)


def _list_part(name: str, value: Sequence[Any], shape: _Shape) -> Hashable:
    if name in SHARED:
        return type(value), tuple(_part(name, each, shape) for each in value)
    if not value:
        return type(value), "empty"
    if name in LAYERS and all(map(torch.is_tensor, value)):
        layers = [_tensor_part("encoder_hidden_states", each, shape) for each in value]
        return type(value), tuple(layers)
    if name in ALIKE and all(each == value[0] for each in value):
        return "alike", repr(value[0])
    tensors = len(value) == shape.rows and all(map(torch.is_tensor, value))
    if name in BY_ROW and shape.form == "list" and tensors:
        kinds = {(each.dtype, each.device, tuple(each.shape[1:])) for each in value}
        if len(kinds) == 1:
            return "list", type(value), kinds.pop()
    raise Unmergeable(name)


def _merge(name: str, values: Sequence[Any], rows: Sequence[int]) -> Any:
    first = values[0]
    if name in SHARED:
        return _merge_shared(name, values)
    if name in ALIKE and isinstance(first, (list, tuple)) and first:
        return type(first)([first[0]] * sum(rows))
    if torch.is_tensor(first):
        if name in TIMES and first.ndim < 2:
            values = [each.reshape(-1).expand(n) for each, n in zip(values, rows, strict=True)]
        return torch.cat(list(values), dim=int(name in BY_SECOND))
    if isinstance(first, dict):
        return {key: _merge(key, [each[key] for each in values], rows) for key in first}
    return _merge_lists(name, values) if isinstance(first, (list, tuple)) else first


def _merge_lists(name: str, values: Sequence[Any]) -> Any:
    make = type(values[0])
    if name in LAYERS:
        return make(torch.cat(layer) for layer in zip(*values, strict=True))
    return make(row for value in values for row in value)


# Pairs of tensors that were compared, for as long as both live: pipelines make their positions once
# and pass the same tensors in each step, and a comparison waits for the device.
_compared: Any = WeakIdKeyDictionary()


def _are_equal(first: torch.Tensor, other: torch.Tensor, *, rows: bool = False) -> bool:
    """Tell whether two tensors, which nobody writes into, are equal.

    With `rows` whether each row of `other` equals the first row of `first`.
    """
    if other is first and not rows:
        return True
    known = _compared.get(first)
    if known is None:
        known = _compared[first] = WeakIdKeyDictionary()
    answer: bool | None = known.get(other)
    if answer is None:
        wanted = first[:1].expand_as(other) if rows else first
        answer = known[other] = torch.equal(other, wanted)
    return answer


def _merge_shared(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, (list, tuple)):
        return type(first)(_merge_shared(name, items) for items in zip(*values, strict=True))
    if not torch.is_tensor(first):
        return first
    rows = first.ndim == _OF_EACH and name in POSITION_ROWS
    if not all(_are_equal(first, each, rows=rows) for each in values):
        raise Unmergeable(name)
    return torch.cat(list(values)) if rows else first


def _split(item: Any, rows: Sequence[int], form: Form) -> list[Any]:
    if item is None:
        return [None] * len(rows)
    if form == "tensor" and torch.is_tensor(item) and item.ndim and item.shape[0] == sum(rows):
        return list(torch.split(item, list(rows)))
    if form == "list" and isinstance(item, (list, tuple)) and len(item) == sum(rows):
        ends = [sum(rows[: index + 1]) for index in range(len(rows))]
        return [item[end - n : end] for end, n in zip(ends, rows, strict=True)]
    raise Unmergeable("output")


def choose_rows(arguments: Arguments, chosen: Sequence[int], rows: int) -> dict[str, Any]:
    """Return the arguments of a call of `rows` rows for the `chosen` ones alone, in that order."""
    return {name: _choose(name, value, chosen, rows) for name, value in arguments.items()}


def pick(value: torch.Tensor, chosen: Sequence[int], dim: int = 0) -> torch.Tensor:
    """Return some rows of a tensor; by views, since to move their numbers waits for the device."""
    return torch.stack([value.select(dim, index) for index in chosen], dim)


def place_rows(outputs: Sequence[Any], places: Sequence[Sequence[int]], rows: int) -> Any:
    """Put the rows of `outputs` in their places among `rows`; those of nobody are zero.

    Raises:
        Unmergeable: An output has not the rows of its call.
    """
    first = outputs[0]
    if first is None:
        return None
    if type(first) is tuple:
        return tuple(place_rows(items, places, rows) for items in zip(*outputs, strict=True))
    if isinstance(first, dict):
        make: Any = type(first)
        return make(
            **{name: place_rows([each[name] for each in outputs], places, rows) for name in first}
        )
    if any(len(output) != len(place) for output, place in zip(outputs, places, strict=True)):
        raise Unmergeable("output")
    if torch.is_tensor(first):
        placed = first.new_zeros((rows, *first.shape[1:]))
        for output, place in zip(outputs, places, strict=True):
            for index, row in zip(place, output, strict=True):
                placed[index] = row
        return placed
    listed = [torch.zeros_like(first[0])] * rows
    for output, place in zip(outputs, places, strict=True):
        for row, index in zip(output, place, strict=True):
            listed[index] = row
    return type(first)(listed)


def _choose(name: str, value: Any, chosen: Sequence[int], rows: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _choose(key, each, chosen, rows) for key, each in value.items()}
    if torch.is_tensor(value):
        return _choose_of_tensor(name, value, chosen, rows)
    if isinstance(value, (list, tuple)) and name in SHARED | LAYERS:
        return type(value)(_choose(name, each, chosen, rows) for each in value)
    if isinstance(value, (list, tuple)) and len(value) == rows:
        return type(value)(value[index] for index in chosen)
    return value


def _choose_of_tensor(name: str, value: torch.Tensor, chosen: Sequence[int], rows: int) -> Any:
    one_for_all = name in TIMES and value.ndim < 2 and value.numel() == 1
    rows_of_positions = name in POSITION_ROWS and value.ndim == _OF_EACH
    if one_for_all or (name in SHARED and not rows_of_positions):
        return value
    if name in BY_SECOND:
        return pick(value, chosen, 1)
    if name in BY_FRAME and len(value) != rows:
        return pick(value.reshape(rows, -1, *value.shape[1:]), chosen).flatten(0, 1)
    return pick(value, chosen)
