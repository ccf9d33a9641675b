"""What is learnt from the times of forwards."""

import pytest

from workers.batch_lesson import BatchLesson


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


def test_a_batch_that_is_slower_than_its_parts_shrinks(lesson: BatchLesson):
    for _ in range(5):
        assert lesson.allows(6)
        lesson.note([2, 2, 2], 3.4)
    assert not lesson.allows(6)
    assert lesson.allows(4)


def test_a_batch_that_is_faster_than_its_parts_stays(lesson: BatchLesson):
    for _ in range(20):
        lesson.note([2, 2], 1.9)
    assert lesson.allows(4)


def test_one_slow_forward_proves_nothing(lesson: BatchLesson):
    for seconds in (1.5, 9.0, 1.5, 9.0, 1.5):
        lesson.note([2, 2], seconds)
    assert lesson.allows(4)


def test_parts_that_never_ran_alone_teach_nothing():
    lesson = BatchLesson()
    for _ in range(5):
        lesson.note([2, 2], 9.0)
    assert lesson.allows(4)


def test_a_size_that_was_too_slow_is_tried_again_much_later(lesson: BatchLesson):
    for _ in range(5):
        lesson.note([2, 2], 3.0)
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
