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
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from workers.batch_lesson import BatchLesson
from workers.shared_forward import Call, Forward, run_group

_LESSONS_KEPT = 1000
# What the denoisers are set to after a switch that failed; equal to no key.
_UNKNOWN = object()


class Member:
    """One request's seat; it is waited for only between its first call and :meth:`leave`.

    Attributes:
        alone: Whether its calls are never merged.
        key: What the denoiser must be set to for its calls, such as its LoRA adapters; calls of
            different keys are never merged.
        signature: That of its last call; None while nobody need wait for it.
    """

    def __init__(self, rendezvous: "Rendezvous", *, alone: bool, key: Hashable) -> None:
        """Made by :meth:`Rendezvous.member`."""
        self.alone = alone
        self.key = key
        self.signature: Any = None
        self._rendezvous = rendezvous
        self._calls = self._shared = 0

    @property
    def batch_mean(self) -> float:
        """Mean number of requests that shared its forwards, itself included."""
        return self._shared / self._calls if self._calls else 1.0

    def leave(self) -> None:
        """Be waited for no longer; further calls run alone."""
        self.alone = True
        self._rendezvous.forget(self)

    def count(self, call: Call) -> None:
        """Note how many shared the forward of `call`."""
        self._calls += 1
        self._shared += call.shared


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
        self._calls: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._waiting: list[Call] = []
        self._members: set[Member] = set()
        self._key: Hashable = None
        self._busy = False
        self._free_since = 0.0
        self._lessons: dict[Any, BatchLesson] = {}
        self._local = threading.local()
        for module in denoisers:
            module.forward = self._replacement(module)

    @contextmanager
    def member(self, *, alone: bool = False, key: Hashable = None) -> Iterator[Member]:
        """Make the calls of this thread those of one request; see :class:`Member`."""
        member = self._local.member = Member(self, alone=alone, key=key)
        try:
            yield member
        finally:
            del self._local.member
            member.leave()

    def forget(self, member: Member) -> None:
        """Wait for `member` no longer."""
        with self._changed:
            self._members.discard(member)
            self._changed.notify_all()

    @property
    def histogram(self) -> dict[int, int]:
        """Number of forwards so far, by the number of requests that shared them."""
        with self._changed:
            return {shared: calls // shared for shared, calls in sorted(self._calls.items())}

    @property
    def waiting(self) -> int:
        """Calls that wait for the others or for the device now."""
        return len(self._waiting)

    def _replacement(self, module: Any) -> Forward:
        forward: Forward = module.forward
        # That of the class: what libraries put over it hides the names of the arguments.
        own = inspect.signature(type(module).forward)
        signature = own.replace(parameters=list(own.parameters.values())[1:])

        @functools.wraps(forward)
        def meet(*args: Any, **kwargs: Any) -> Any:
            member: Member | None = getattr(self._local, "member", None)
            if member is None:
                return forward(*args, **kwargs)
            call = Call(forward, args, kwargs, member.key, time.monotonic())
            if not member.alone:
                call.describe(signature)
            self._wait_for(call, member)
            member.count(call)
            return call.result()

        return meet

    def _wait_for(self, call: Call, member: Member) -> None:
        with self._changed:
            member.signature = call.signature
            if call.signature is not None:
                self._members.add(member)
            self._waiting.append(call)
            self._changed.notify_all()
            try:
                while not call.done:
                    group, patience = self._next_group()
                    if call not in group:
                        self._changed.wait()
                    elif patience > 0:
                        self._changed.wait(patience)
                    else:
                        self._run(group)
            finally:
                if call in self._waiting:  # this thread was told to end while it waited
                    self._waiting.remove(call)
                    self._changed.notify_all()

    def _next_group(self) -> tuple[list[Call], float]:
        """The calls to run next and the seconds to wait before; none while a forward runs."""
        if self._busy or not self._waiting:
            return [], 0.0
        head = self._waiting[0]
        if head.layout is None:
            return [head], 0.0
        lesson, group, rows = self._lesson(head.signature), [head], head.rows
        for call in self._waiting[1:]:
            if call.signature == head.signature and lesson.allows(rows + call.rows):
                group.append(call)
                rows += call.rows
        awaited = sum(member.signature == head.signature for member in self._members)
        here = sum(call.signature == head.signature for call in self._waiting)
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
        lesson = self._lesson(group[0].signature)
        for call in group:
            self._waiting.remove(call)
        self._busy = True
        self._changed.release()
        try:
            if self._set_to(group):
                run_group(group, lesson)
        finally:
            self._changed.acquire()
            self._busy = False
            self._free_since = time.monotonic()
            for call in group:
                call.done = True
                self._calls[call.shared] += 1
            self._changed.notify_all()

    def _set_to(self, group: list[Call]) -> bool:
        """Set the denoisers to the key of `group`; where that fails its calls have failed."""
        if self._key == group[0].key:
            return True
        try:
            self._key = _UNKNOWN
            self.switch(group[0].key)
            self._key = group[0].key
        except BaseException as error:  # noqa: BLE001 - raised in the threads whose calls they are
            for call in group:
                call.error = error
            return False
        return True

    def _lesson(self, signature: Any) -> BatchLesson:
        if len(self._lessons) > _LESSONS_KEPT:
            self._lessons.clear()
        return self._lessons.setdefault(signature, BatchLesson())
