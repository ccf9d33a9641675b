"""What is learnt from the times of forwards."""

import pytest

from workers.sharing.call import BatchStats


@pytest.fixture
def stats():
    stats = BatchStats()
    for _ in range(3):
        stats.note([2], 1.0)
    return stats


def test_everything_is_allowed_until_something_is_learnt(stats: BatchStats):
    assert stats.allows(1000)
    assert stats.step_s(2) == 1.0
    assert stats.step_s(4) is None


def weigh(stats: BatchStats, rows: list[int], *ratios: float):
    for ratio in ratios:
        stats.weigh(rows, ratio, 1.0)


def test_a_batch_that_seems_slower_than_its_parts_is_weighed_and_shrinks(stats: BatchStats):
    for _ in range(5):
        assert not stats.doubts([2, 2, 2])
        stats.note([2, 2, 2], 3.4)
    assert stats.doubts([2, 2, 2])
    weigh(stats, [2, 2, 2], 1.2, 1.2, 1.2, 1.2)
    assert stats.allows(6)
    weigh(stats, [2, 2, 2], 1.2)
    assert not stats.allows(6)
    assert stats.allows(4)
    assert (stats.most([2] * 3), stats.most([2] * 2)) == (1, 1)
    stats.right = True
    assert (stats.most([2] * 3), stats.most([2] * 2), stats.most([6] * 2)) == (2, 2, 1)


def test_a_batch_that_is_faster_than_its_parts_stays(stats: BatchStats):
    for _ in range(20):
        stats.note([2, 2], 1.9)
        assert not stats.doubts([2, 2])
    assert stats.allows(4)


def test_a_batch_that_only_seemed_slower_stays_and_is_left_in_peace(stats: BatchStats):
    """A busy machine makes anything seem slower than it was before."""
    for _ in range(5):
        stats.note([2, 2], 9.0)
    weigh(stats, [2, 2], 0.6, 5.0, 0.6, 5.0, 0.6)
    assert stats.allows(4)
    for _ in range(199):
        stats.note([2, 2], 9.0)
        assert not stats.doubts([2, 2])
    stats.note([2, 2], 9.0)
    assert stats.doubts([2, 2])


def test_parts_that_never_ran_alone_teach_nothing():
    stats = BatchStats()
    for _ in range(5):
        stats.note([2, 2], 9.0)
    assert not stats.doubts([2, 2])


def test_a_size_that_was_too_slow_is_tried_again_much_later(stats: BatchStats):
    weigh(stats, [2, 2], *[1.5] * 5)
    for _ in range(199):
        stats.note([2], 1.0)
        assert not stats.allows(4)
    stats.note([2], 1.0)
    assert stats.allows(4)
    assert stats.step_s(4) is None


def test_too_little_memory_limits_at_once(stats: BatchStats):
    stats.limit([2, 2, 2])
    assert not stats.allows(6)
    assert stats.allows(4)


def test_what_was_found_wrong_is_never_allowed(stats: BatchStats):
    stats.right = False
    assert not stats.allows(2)


def test_memory_allows_as_many_rows_as_fit_by_what_a_row_was_seen_to_take(stats: BatchStats):
    assert stats.allows(1000)
    stats.note_memory(2, peak_bytes=1200, free_bytes=4000)
    assert stats.allows(5)
    assert not stats.allows(6)
    # What does not grow with the rows weighs less in a larger forward.
    stats.note_memory(4, peak_bytes=1600, free_bytes=4000)
    assert stats.allows(8)
    assert not stats.allows(9)
    stats.note_memory(4, peak_bytes=1600, free_bytes=400)
    assert not stats.allows(2)


def test_a_cpu_has_no_such_limit(stats: BatchStats):
    stats.note_memory(2, None, None)
    assert stats.allows(1000)
