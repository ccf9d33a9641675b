"""What was learnt of each kind of denoiser call. Knows neither tensors nor who calls."""

from typing import Any

from workers.denoiser.batch_lesson import BatchLesson
from workers.denoiser.call import Call

_KEPT = 1000


class Lessons:
    """A lesson for each kind; once there are too many, all are learnt anew."""

    def __init__(self) -> None:
        """Nothing was learnt."""
        self._lessons: dict[Any, BatchLesson] = {}

    def of(self, call: Call) -> BatchLesson | None:
        """Return the lesson that a call follows and adds to; None for one that runs alone."""
        if call.layout is None:
            return None
        kind = call.kind
        lesson = self._lessons.get(kind)
        if lesson is None:
            if len(self._lessons) > _KEPT:
                self._lessons.clear()
            lesson = self._lessons[kind] = BatchLesson()
        if lesson.pads is False:  # then each length is a kind of its own
            return self._lessons.setdefault((kind, call.layout.lengths), BatchLesson())
        return lesson
