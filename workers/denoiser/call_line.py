"""The line of denoiser calls that wait: which go next, together, and how long the first waits.

Used under the rendezvous' lock. Does not know how calls run and who wakes whom.
"""

import time
from collections.abc import Iterable

from workers.denoiser.batch_lesson import BatchLesson
from workers.denoiser.call import Call
from workers.denoiser.member import Member


class CallLine:
    """Calls in the order of their coming, and whose next call is worth waiting for.

    Attributes:
        max_wait_s: Longest that the first in line waits for others while the device is free.
        wait_share: The same, in parts of what its forward takes.
        free_since: When the device became free, on the clock of `time.monotonic`.
    """

    def __init__(self) -> None:
        """Nobody is here."""
        self.max_wait_s = 0.005
        self.wait_share = 0.25
        self.free_since = 0.0
        self._calls: list[Call] = []
        self._members: set[Member] = set()

    def __len__(self) -> int:
        """How many calls wait."""
        return len(self._calls)

    @property
    def first(self) -> Call | None:
        """The call that has waited longest."""
        return self._calls[0] if self._calls else None

    def join(self, calls: Iterable[Call], member: Member) -> None:
        """Put the calls of a member at the end; others wait for its next ones if it shares any."""
        calls = list(calls)
        member.kind = calls[0].lesson if calls[0].layout is not None else None
        if member.kind is not None:
            self._members.add(member)
        self._calls += calls

    def remove(self, calls: Iterable[Call]) -> bool:
        """Take calls out of the line; return whether any was in it."""
        here = [call for call in calls if call in self._calls]
        for call in here:
            self._calls.remove(call)
        return bool(here)

    def forget(self, member: Member) -> None:
        """Let nobody wait for a member any more."""
        self._members.discard(member)

    def next_group(self) -> tuple[list[Call], float]:
        """Return the calls to run next and the seconds to wait before; none where none waits."""
        head = self.first
        if head is None:
            return [], 0.0
        lesson = head.lesson
        if head.layout is None or lesson is None:
            return [head], 0.0
        group, rows = [head], head.rows
        alike = [call for call in self._calls if call.lesson is lesson]
        for call in alike[1:]:
            if lesson.allows(rows + call.rows):
                group.append(call)
                rows += call.rows
        awaited = sum(member.kind is lesson for member in self._members)
        here = len({call.member for call in alike})
        if awaited <= here or not lesson.allows(rows + head.rows):
            return group, 0.0
        return group, self._patience_s(head, lesson)

    def _patience_s(self, head: Call, lesson: BatchLesson) -> float:
        step_s = lesson.step_s(head.rows)
        limit = self.max_wait_s
        if step_s is not None:
            limit = min(limit, self.wait_share * step_s)
        # From when the device was free: else whoever queued behind a long forward has waited
        # enough already, and goes alone for ever.
        since = max(head.arrived, self.free_since)
        return max(since + limit - time.monotonic(), 0.0)
