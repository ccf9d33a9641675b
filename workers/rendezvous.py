"""Where requests meet: calls of one denoiser by several of them become one forward.

Each pipeline runs its own loop in its own thread and knows nothing of this: only `forward` of the
denoiser is replaced, on the instance, so that its type, configuration and hooks stay. The first
call in line goes first and takes along those of its signature that wait too; it waits a little for
requests that are inside their loop and made such a call last. Forwards run one at a time. Does not
know families, schedulers and how arguments are merged.
"""

import functools
import inspect
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from workers.batch_lesson import BatchLesson
from workers.denoiser_call import Call, Forward
from workers.member import Bell, Member
from workers.shared_forward import run_group

_LESSONS_KEPT = 1000
# What the denoisers are set to after a switch that failed; equal to no key.
_UNKNOWN = object()


class Rendezvous:
    """Stands before the denoisers of one pipeline.

    Attributes:
        max_wait_s: Longest that the first in line waits for others while the device is free.
        wait_share: The same, in parts of what its forward takes.
        switch: Sets the denoisers to a key; called before forwards of another key than the last,
            while no other forward runs. What it raises is raised in the calls of that key.
    """

    def __init__(self, denoisers: Iterable[Any]) -> None:
        """Replace `forward` of the modules; of a thread that is no member calls pass through."""
        self.max_wait_s = 0.005
        self.wait_share = 0.25
        self.switch: Callable[[Hashable], None] = lambda _: None
        self._served: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._waiting: list[Call] = []
        self._members: set[Member] = set()
        self._key: Hashable = None
        self._busy = False
        self._holders: deque[Bell] = deque()
        self._free_since = 0.0
        self._lessons: dict[Any, BatchLesson] = {}
        self._local = threading.local()
        for module in denoisers:
            module.forward = self._replacement(module)

    @contextmanager
    def member(
        self, *, alone: bool = False, key: Hashable = None, requests: int = 1
    ) -> Iterator[Member]:
        """Make the calls of this thread those of so many requests; see :class:`Member`."""
        member = Member(self._forget, alone=alone, key=key, requests=requests)
        self._local.member = member
        try:
            yield member
        finally:
            del self._local.member
            member.leave()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep forwards out while the denoisers are changed; what they were set to is forgotten."""
        bell = Bell()
        with self._lock:
            waits = self._busy
            self._busy = True
            if waits:
                self._holders.append(bell)
        if waits:
            bell.wait()
        try:
            yield
        finally:
            with self._lock:
                self._key = _UNKNOWN
                self._pass_on()

    @property
    def histogram(self) -> dict[int, int]:
        """Number of forwards so far, by the number of requests that shared them."""
        with self._lock:
            return {shared: served // shared for shared, served in sorted(self._served.items())}

    @property
    def waiting(self) -> int:
        """Calls that wait for the others or for the device now."""
        return len(self._waiting)

    def _forget(self, member: Member) -> None:
        with self._lock:
            self._members.discard(member)
            self._ring_first()

    def _ring_first(self) -> None:
        """Have the first in line look whether its time has come."""
        if self._waiting and not self._busy:
            self._waiting[0].member.bell.ring()

    def _replacement(self, module: Any) -> Forward:
        forward: Forward = module.forward
        # That of the class: what libraries put over it hides the names of the arguments.
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]

        @functools.wraps(forward)
        def meet(*args: Any, **kwargs: Any) -> Any:
            member: Member | None = getattr(self._local, "member", None)
            if member is None:
                return forward(*args, **kwargs)
            call = Call(forward, args, kwargs, member, time.monotonic())
            if not member.alone:
                call.describe(names)
            parts = []
            with self._lock:
                call.lesson = self._lesson(call)
            if not member.alone:
                parts = call.parts()
            self._wait_for([part for part, _ in parts] or [call], member)
            if parts:
                call.gather(parts)
            return call.result()

        return meet

    def _wait_for(self, calls: list[Call], member: Member) -> None:
        with self._lock:
            member.kind = calls[0].lesson if calls[0].layout is not None else None
            if member.kind is not None:
                self._members.add(member)
            self._waiting += calls
            try:
                while not all(call.done for call in calls):
                    group, patience = self._next_group()
                    if group and patience <= 0:
                        # Whoever sees that a group is complete runs it, so that nobody need wake
                        # for it.
                        self._run(group)
                    else:
                        first = bool(group) and group[0] in calls
                        self._sleep(member, patience if first else None)
                for call in calls:
                    member.count(call.shared)
            finally:
                left = [call for call in calls if call in self._waiting]
                for call in left:  # this thread was told to end while it waited
                    self._waiting.remove(call)
                if left:
                    self._ring_first()

    def _sleep(self, member: Member, timeout_s: float | None) -> None:
        self._lock.release()
        try:
            member.bell.wait(timeout_s)
        finally:
            self._lock.acquire()

    def _next_group(self) -> tuple[list[Call], float]:
        """The calls to run next and the seconds to wait before; none while a forward runs."""
        if self._busy or not self._waiting:
            return [], 0.0
        head = self._waiting[0]
        lesson = head.lesson
        if head.layout is None or lesson is None:
            return [head], 0.0
        group, rows = [head], head.rows
        alike = [call for call in self._waiting if call.lesson is lesson]
        for call in alike[1:]:
            if lesson.allows(rows + call.rows):
                group.append(call)
                rows += call.rows
        awaited = sum(member.kind is lesson for member in self._members)
        here = len({call.member for call in alike})
        if awaited <= here or not lesson.allows(rows + head.rows):
            return group, 0.0
        step_s = lesson.step_s(head.rows)
        limit = self.max_wait_s
        if step_s is not None:
            limit = min(limit, self.wait_share * step_s)
        # From when the device was free: else whoever queued behind a long forward has waited
        # enough already, and goes alone for ever.
        since = max(head.arrived, self._free_since)
        return group, max(since + limit - time.monotonic(), 0.0)

    def _run(self, group: list[Call]) -> None:
        """Run a group, with the lock open meanwhile."""
        for call in group:
            self._waiting.remove(call)
        self._busy = True
        self._lock.release()
        try:
            if self._set_to(group):
                run_group(group, group[0].lesson or BatchLesson())
        finally:
            self._lock.acquire()
            for call in group:
                call.done = True
                self._served[call.shared] += call.requests
                call.member.bell.ring()
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next use the denoisers: whoever waits to hold them, else the first in line."""
        self._free_since = time.monotonic()
        if self._holders:
            self._holders.popleft().ring()
        else:
            self._busy = False
            self._ring_first()

    def _set_to(self, group: list[Call]) -> bool:
        """Set the denoisers to the key of `group`; where that fails its calls have failed."""
        key = group[0].member.key
        if self._key == key:
            return True
        try:
            self._key = _UNKNOWN
            self.switch(key)
            self._key = key
        except BaseException as error:  # noqa: BLE001 - raised in the threads whose calls they are
            for call in group:
                call.error = error
            return False
        return True

    def _lesson(self, call: Call) -> BatchLesson | None:
        if call.layout is None:
            return None
        if len(self._lessons) > _LESSONS_KEPT:
            self._lessons.clear()
        lesson = self._lessons.setdefault(call.kind, BatchLesson())
        if lesson.pads is False:  # then each length is a kind of its own
            return self._lessons.setdefault((call.kind, call.layout.lengths), BatchLesson())
        return lesson
