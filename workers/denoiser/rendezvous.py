"""Where requests meet: calls of one denoiser by several of them become one forward.

Each pipeline runs its own loop in its own thread and knows nothing of this: only `forward` of the
denoiser is replaced, on the instance, so that its type, configuration and hooks stay. The first
call in line goes first and takes along those of its signature that wait too; it waits a little for
requests that are inside their loop and made such a call last. Forwards run one at a time. Does not
know families, schedulers and how arguments are merged.
"""

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from workers.denoiser.batch_lesson import BatchLesson
from workers.denoiser.call import Call, Forward
from workers.denoiser.call_line import CallLine
from workers.denoiser.lessons import Lessons
from workers.denoiser.member import Bell, Member
from workers.denoiser.method_signatures import method_signature
from workers.denoiser.shared_forward import run_group

# What the denoisers are set to after a switch that failed; equal to no key.
_UNKNOWN = object()


class Rendezvous:
    """Stands before the denoisers of one pipeline.

    Attributes:
        line: The calls that wait, and how long they do.
        switch: Sets the denoisers to a key; called before forwards of another key than the last,
            while no other forward runs. What it raises is raised in the calls of that key.
    """

    def __init__(self, denoisers: Iterable[Any]) -> None:
        """Replace `forward` of the modules; of a thread that is no member calls pass through."""
        self.line = CallLine()
        self.switch: Callable[[Hashable], None] = lambda _: None
        self._served: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._key: Hashable = None
        self._busy = False
        self._holders: deque[Bell] = deque()
        self._lessons = Lessons()
        self._local = threading.local()
        for module in denoisers:
            module.forward = self._replacement(module)

    @contextmanager
    def member(
        self, *, alone: bool = False, key: Hashable = None, outputs: Sequence[int] = (1,)
    ) -> Iterator[Member]:
        """Make the calls of this thread those of requests, each with so many outputs.

        See :class:`Member`.
        """
        member = Member(self._forget, alone=alone, key=key, outputs=outputs)
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
        return len(self.line)

    def _forget(self, member: Member) -> None:
        with self._lock:
            self.line.forget(member)
            self._ring_first()

    def _ring_first(self) -> None:
        """Have the first in line look whether its time has come."""
        if self.line.first is not None and not self._busy:
            self.line.first.member.bell.ring()

    def _replacement(self, module: Any) -> Forward:
        forward: Forward = module.forward
        # That of the class: what libraries put over it hides the names of the arguments.
        names = tuple(method_signature(type(module).forward).parameters)

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
                call.lesson = self._lessons.of(call)
            if not member.alone:
                parts = call.parts()
            self._wait_for([part for part, _ in parts] or [call], member)
            if parts:
                call.gather(parts)
            return call.result()

        return meet

    def _wait_for(self, calls: list[Call], member: Member) -> None:
        try:
            with self._lock:
                self.line.join(calls, member)
                patience_s = self._run_what_is_due(calls)
            while not _done(calls):
                member.bell.wait(patience_s)
                # All of a group wake at once: who is done does not queue for the lock again.
                if not _done(calls):
                    with self._lock:
                        patience_s = self._run_what_is_due(calls)
            for call in calls:
                member.count(call.shared)
        finally:
            if not _done(calls):  # this thread was told to end while it waited
                with self._lock:
                    if self.line.remove(calls):
                        self._ring_first()

    def _run_what_is_due(self, calls: list[Call]) -> float | None:
        """Run groups that are due until there is none, or until `calls` are done.

        Whoever sees that a group is complete runs it, so that nobody need wake for it. Returns how
        long the thread of `calls` may then sleep before it looks again; None is until it is woken.
        """
        while not _done(calls) and not self._busy:
            group, patience_s = self.line.next_group()
            if not group:
                return None
            if patience_s > 0:
                return patience_s if group[0] in calls else None
            self._run(group)
        return None

    def _run(self, group: list[Call]) -> None:
        """Run a group, with the lock open meanwhile."""
        self.line.remove(group)
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
        self.line.free_since = time.monotonic()
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


def _done(calls: list[Call]) -> bool:
    return all(call.done for call in calls)
