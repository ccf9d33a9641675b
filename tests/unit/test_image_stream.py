"""Which previews of a run a stream of pictures brings."""

from __future__ import annotations

import pytest

from api.openai.image_stream import Spread


@pytest.mark.parametrize(
    ("most", "steps", "shown", "taken"),
    [
        (0, 30, range(1, 31), []),
        (1, 30, range(1, 31), [15]),
        (2, 30, range(1, 31), [10, 20]),
        (3, 4, range(1, 5), [1, 2, 3]),
        (3, 2, range(1, 3), [1, 2]),
        (3, 30, [1, 29], [29]),
        (2, 30, [30], [30]),
        (2, 0, [1, 2], []),
        # A second attempt begins anew.
        (2, 30, [12, 5, 12, 21], [12, 21]),
    ],
)
def test_previews_are_spread_over_the_steps(
    most: int, steps: int, shown: range | list[int], taken: list[int]
) -> None:
    spread = Spread(most)
    assert [step for step in shown if spread.picks(step, steps)] == taken
