"""What is learnt from the times of forwards."""

import pytest

from workers.sharing.stats import BatchLesson


@pytest.fixture
def lesson():
    lesson = BatchLesson()
    for _ in range(3):
        lesson.note([2], 1.0)
    return lesson


def test_everything_is_allowed_until_something_is_learnt(lesson: BatchLesson):
    assert lesson.allows(1000)
    assert lesson.step_s(2) == 1.0
    assert lesson.step_s(4) is None


def weigh(lesson: BatchLesson, rows: list[int], *ratios: float):
    for ratio in ratios:
        lesson.weigh(rows, ratio, 1.0)


def test_a_batch_that_seems_slower_than_its_parts_is_weighed_and_shrinks(lesson: BatchLesson):
    for _ in range(5):
        assert not lesson.doubts([2, 2, 2])
        lesson.note([2, 2, 2], 3.4)
    assert lesson.doubts([2, 2, 2])
    weigh(lesson, [2, 2, 2], 1.2, 1.2, 1.2, 1.2)
    assert lesson.allows(6)
    weigh(lesson, [2, 2, 2], 1.2)
    assert not lesson.allows(6)
    assert lesson.allows(4)
    assert (lesson.most([2] * 3), lesson.most([2] * 2)) == (1, 1)
    lesson.proven = True
    assert (lesson.most([2] * 3), lesson.most([2] * 2), lesson.most([6] * 2)) == (2, 2, 1)


def test_a_batch_that_is_faster_than_its_parts_stays(lesson: BatchLesson):
    for _ in range(20):
        lesson.note([2, 2], 1.9)
        assert not lesson.doubts([2, 2])
    assert lesson.allows(4)


def test_a_batch_that_only_seemed_slower_stays_and_is_left_in_peace(lesson: BatchLesson):
    """A busy machine makes anything seem slower than it was before."""
    for _ in range(5):
        lesson.note([2, 2], 9.0)
    weigh(lesson, [2, 2], 0.6, 5.0, 0.6, 5.0, 0.6)
    assert lesson.allows(4)
    for _ in range(199):
        lesson.note([2, 2], 9.0)
        assert not lesson.doubts([2, 2])
    lesson.note([2, 2], 9.0)
    assert lesson.doubts([2, 2])


def test_parts_that_never_ran_alone_teach_nothing():
    lesson = BatchLesson()
    for _ in range(5):
        lesson.note([2, 2], 9.0)
    assert not lesson.doubts([2, 2])


def test_a_size_that_was_too_slow_is_tried_again_much_later(lesson: BatchLesson):
    weigh(lesson, [2, 2], *[1.5] * 5)
    for _ in range(199):
        lesson.note([2], 1.0)
        assert not lesson.allows(4)
    lesson.note([2], 1.0)
    assert lesson.allows(4)
    assert lesson.step_s(4) is None


def test_too_little_memory_limits_at_once(lesson: BatchLesson):
    lesson.limit([2, 2, 2])
    assert not lesson.allows(6)
    assert lesson.allows(4)


def test_what_was_found_wrong_is_never_allowed(lesson: BatchLesson):
    lesson.proven = False
    assert not lesson.allows(2)


def test_memory_allows_as_many_rows_as_fit_by_what_a_row_was_seen_to_take(lesson: BatchLesson):
    assert lesson.allows(1000)
    lesson.note_memory(2, peak_bytes=1200, free_bytes=4000)
    assert lesson.allows(5)
    assert not lesson.allows(6)
    # What does not grow with the rows weighs less in a larger forward.
    lesson.note_memory(4, peak_bytes=1600, free_bytes=4000)
    assert lesson.allows(8)
    assert not lesson.allows(9)
    lesson.note_memory(4, peak_bytes=1600, free_bytes=400)
    assert not lesson.allows(2)


def test_a_cpu_has_no_such_limit(lesson: BatchLesson):
    lesson.note_memory(2, None, None)
    assert lesson.allows(1000)
