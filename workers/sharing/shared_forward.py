"""Runs a group of denoiser calls: as one forward where that is right, else one by one."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from workers.failures import is_out_of_memory, short_cause
from workers.sharing.call import BatchStats, Call, warn_once
from workers.sharing.checks import new_differences, worst_excess
from workers.sharing.cost import ForwardCost
from workers.sharing.merging import Unmergeable, merge, split

_logger = logging.getLogger(__name__)


def run_group(group: Sequence[Call], stats: BatchStats, *, wait: bool = False) -> None:
    """Give each call its output or its error; several calls are of one kind.

    With `wait` only once the device has done it: others come meanwhile, to go together.
    """
    _run_group(group, stats)
    if wait:
        stats.wait()


def _run_group(group: Sequence[Call], stats: BatchStats) -> None:
    failure, scarce = None, False
    if len(group) > 1 and _right(group, stats) is not False:
        try:
            if _run_merged(group, stats):
                return
        except BaseException as error:  # noqa: BLE001 - whose it is shows when they run one by one
            failure = short_cause(error)
            scarce = is_out_of_memory(error)
    # Out here, where no traceback holds the memory of the merged forward any more.
    if failure is not None:
        _logger.warning("%d calls together failed, each runs alone: %s", len(group), failure)
        torch.cuda.empty_cache()
    for call in group:
        _run_alone(call, stats)
    if failure is not None and scarce:
        stats.limit([each for call in group for each in call.row_counts])
    elif failure is not None and all(call.error is None for call in group):
        _note_check(group, stats, right=False)


def _right(group: Sequence[Call], stats: BatchStats) -> bool | None:
    return stats.pads if _is_padded(group) else stats.right


def _note_check(group: Sequence[Call], stats: BatchStats, *, right: bool) -> None:
    if _is_padded(group):
        stats.pads = right
    else:
        stats.right = right


def _is_padded(group: Sequence[Call]) -> bool:
    return len({call.layout.lengths for call in group if call.layout is not None}) > 1


def _run_alone(call: Call, stats: BatchStats) -> None:
    call.shared = call.requests
    try:
        with _cost(call, stats) as cost:
            call.output = call.forward(*call.args, **call.kwargs)
        if call.layout is not None:
            _note([call], call.row_counts, stats, cost)
    except BaseException as error:  # noqa: BLE001 - raised in the thread whose call it is
        call.error = error
    if call.requests > 1 and call.error is not None and is_out_of_memory(call.error):
        stats.limit(call.row_counts)
        _run_in_parts(call, stats)


def _run_in_parts(call: Call, stats: BatchStats) -> None:
    """Run a call that was too large for the memory by smaller ones."""
    parts = call.parts()
    if not parts:
        return
    _logger.warning("%d requests together need too much memory, they run by parts", call.requests)
    call.error = None
    torch.cuda.empty_cache()
    for part, _ in parts:
        _run_alone(part, stats)
    call.gather(parts)


def _run_merged(group: Sequence[Call], stats: BatchStats) -> bool:
    """Run the group as one forward; False where its calls have to run one by one."""
    first, rows = group[0], [call.rows for call in group]
    assert first.layout is not None
    try:
        merged = merge([call.arguments for call in group], rows)
        shown = stats.shown[_is_padded(group)]
        compared = new_differences(merged, rows, shown)
        with ForwardCost(first.layout.device, memory=stats.wants_memory(sum(rows))) as cost:
            output = first.forward(**merged)
        parts = split(output, rows, first.layout.form)
        differences = compared.read()  # behind the forward, so that the device need not wait
    except Unmergeable as error:
        if error.name == "output":
            _note_check(group, stats, right=False)
            warn_once(error.name)
        return False
    if _right(group, stats) is None or differences:
        _check(group, parts, stats)
        if _right(group, stats):
            shown |= differences
    else:
        shared = sum(call.requests for call in group)
        for call, part in zip(group, parts, strict=True):
            call.output, call.shared = part, shared
    counts = [each for call in group for each in call.row_counts]
    _note(group, counts, stats, cost)
    return True


def _note(
    group: Sequence[Call], counts: Sequence[int], stats: BatchStats, cost: ForwardCost
) -> None:
    """Learn what a forward took of requests with so many rows.

    Where they seem slower together, see what they take one by one.
    """
    stats.expect(counts, cost)
    stats.note_memory(sum(counts), cost.peak_bytes, cost.free_bytes)
    if len(counts) < 2 or not stats.doubts(counts):
        return
    alone_s = 0.0
    for call in group:
        for part in [part for part, _ in call.parts(size=1)] or [call]:
            cost.wait()  # back to back, each by itself
            with _cost(part, stats) as own:
                part.forward(**part.arguments)
            alone_s += own.seconds
            stats.note(part.row_counts, own.seconds)
    stats.weigh(counts, cost.seconds, alone_s)


def _check(group: Sequence[Call], parts: Sequence[Any], stats: BatchStats) -> None:
    for call in group:
        _run_alone(call, stats)
    if any(call.error is not None for call in group):
        return
    worst = worst_excess(group, parts, padded=_is_padded(group))
    _note_check(group, stats, right=worst <= 1)
    if worst > 1:
        _logger.warning(
            "denoiser calls of this kind%s are not shared: merged they differ from what each gives"
            " alone, %.3g times as much as rounding may",
            " with texts of different lengths" if _is_padded(group) else "",
            worst,
        )


def _cost(call: Call, stats: BatchStats) -> ForwardCost:
    if call.layout is None:
        return ForwardCost(None)
    return ForwardCost(call.layout.device, memory=stats.wants_memory(call.rows))
