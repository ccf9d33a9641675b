"""Whether a merged forward gave its calls what each gives alone.

Float32 rounds so finely that anything else shows. In smaller types a neighbour's time or prompt can
hide in what counts as rounding, so there it is measured what rounding does to this denoiser: a call
merged with copies of itself differs from itself by nothing else. Knows no lessons and who waits.
"""

from collections.abc import Sequence
from typing import Any

from workers.denoiser.call import Call
from workers.denoiser.merging import merge, split
from workers.denoiser.rounding import excess, spread, step_of

# As much as that of copies, times this, may rounding make of other values.
_AS_MUCH = 2.5
# Where copies come out equal to the byte: parts of the step between two numbers near 1. Padding is
# another kernel of attention, whose rounding copies do not show.
_LEAST, _LEAST_PADDED = 0.25, 1.0


def worst_excess(group: Sequence[Call], parts: Sequence[Any], *, padded: bool) -> float:
    """Return how far the parts of a merged forward are from what the calls gave alone.

    In parts of what rounding may make of it: up to 1 they are the same.
    """
    pairs = [(part, call.output) for part, call in zip(parts, group, strict=True)]
    worst = max(excess(part, alone) for part, alone in pairs)
    step = step_of(pairs[0][1])
    if worst > 1 or step is None:
        return worst
    allowed = max(_AS_MUCH * _spread_of_copies(group), step * (_LEAST_PADDED if padded else _LEAST))
    return max(spread(part, alone) for part, alone in pairs) / allowed


def _spread_of_copies(group: Sequence[Call]) -> float:
    call = min(group, key=lambda each: each.rows)
    assert call.layout is not None
    rows = [call.rows] * len(group)
    output = call.forward(**merge([call.arguments] * len(group), rows))
    return max(spread(each, call.output) for each in split(output, rows, call.layout.form))
