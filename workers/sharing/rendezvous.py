"""Where requests meet: calls of one denoiser by several of them become one forward."""

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from workers.patches import method_signature, put
from workers.sharing.call import BatchStats, Bell, Call, Forward, Member
from workers.sharing.shared_forward import run_group


class CallQueue:
    """Calls in the order of their coming, and whose next call is worth waiting for.

    Attributes:
        calls: Those that wait.
        max_wait_s: Longest that the first in the queue waits for others while the device is free.
        wait_share: The same, in parts of what its forward takes.
        free_since: When the device became free, on the clock of `time.monotonic`.
    """

    def __init__(self) -> None:
        """Nobody is here."""
        self.max_wait_s = 0.005
        self.wait_share = 0.25
        self.free_since = 0.0
        self.calls: list[Call] = []
        self._members: set[Member] = set()

    def join(self, calls: Iterable[Call], member: Member) -> None:
        """Put the calls of a member at the end; others wait for its next ones if it shares any."""
        self.calls += calls
        member.kind = self.calls[-1].stats
        if member.kind is not None:
            self._members.add(member)

    def remove(self, calls: Iterable[Call]) -> bool:
        """Take calls out of the queue; return whether any was in it."""
        found = False
        for call in calls:
            if call in self.calls:
                self.calls.remove(call)
                found = True
        return found

    @property
    def several(self) -> bool:
        """Whether more than one is in its loop, whose next calls may go together."""
        return len(self._members) > 1

    def forget(self, member: Member) -> None:
        """Let nobody wait for a member any more."""
        self._members.discard(member)

    def next_group(self) -> tuple[list[Call], float]:
        """Return the calls to run next and the seconds to wait before; none where none waits."""
        if not self.calls:
            return [], 0.0
        head, *others = self.calls
        stats = head.stats
        group, rows = [head], head.rows
        if stats is None:
            return group, 0.0
        awaited = set()
        for member in self._members:
            if member.kind is head.stats:
                awaited.add(member)
        awaited.discard(head.member)
        for call in others:
            if call.stats is head.stats:
                awaited.discard(call.member)
                if stats.allows(rows + call.rows):
                    group.append(call)
                    rows += call.rows
        if not awaited or not stats.allows(rows + head.rows):
            return group, 0.0
        return group, self._patience_s(head, stats)

    def _patience_s(self, head: Call, stats: BatchStats) -> float:
        step_s = stats.step_s(head.rows)
        limit = self.max_wait_s
        if step_s is not None:
            limit = min(limit, self.wait_share * step_s)
        # From when the device was free: else whoever queued behind a long forward has waited
        # enough already, and goes alone for ever.
        since = max(head.arrived, self.free_since)
        return max(since + limit - time.monotonic(), 0.0)


_KINDS_KEPT = 1000


class StatsByKind:
    """Stats for each kind; once there are too many, all are learnt anew.

    Attributes:
        reserved_bytes: Memory that merged forwards leave free.
    """

    def __init__(self) -> None:
        """Nothing was learnt."""
        self.reserved_bytes = 0
        self._stats: dict[Any, BatchStats] = {}

    def of(self, call: Call) -> BatchStats:
        """Return the stats that a call with a layout follows and adds to."""
        assert call.layout is not None
        # Calls of equal kinds may share a forward.
        kind = call.forward, call.member.key, call.layout.signature
        stats = self._stats.get(kind)
        if stats is None:
            if len(self._stats) > _KINDS_KEPT:
                self._stats.clear()
            stats = self._stats[kind] = self._new()
        if stats.pads is False:  # then each length is a kind of its own
            return self._stats.setdefault((kind, call.layout.lengths), self._new())
        return stats

    def _new(self) -> BatchStats:
        return BatchStats(lambda: self.reserved_bytes)


# What the denoisers are set to after a switch that failed; equal to no key.
_UNKNOWN = object()


class Rendezvous:
    """Stands before the denoisers of one pipeline.

    Attributes:
        queue: The calls that wait, and how long they do.
        switch: Sets the denoisers to a key; called before forwards of another key than the last,
            while no other forward runs. What it raises is raised in the calls of that key.
    """

    def __init__(self, denoisers: Iterable[Any]) -> None:
        """Replace `forward` of the modules; of a thread that is no member calls pass through."""
        self.queue = CallQueue()
        self.switch: Callable[[Hashable], None] = lambda _: None
        self._served: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._key: Hashable = None
        self._busy = False
        self._holders: deque[Bell] = deque()
        self._stats = StatsByKind()
        self._local = threading.local()
        for module in denoisers:
            put(module, "forward", self._replacement(module), over=True)

    @contextmanager
    def member(
        self,
        *,
        alone: bool = False,
        key: Hashable = None,
        outputs: Sequence[int] = (1,),
        present: list[bool] | None = None,
    ) -> Iterator[Member]:
        """Make the calls of this thread those of requests, each with so many outputs.

        See :class:`Member`.
        """
        member = Member(self._forget, alone=alone, key=key, outputs=outputs, present=present)
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

    def reserve(self, memory_bytes: int) -> None:
        """Have merged forwards leave so much memory free, for what decodes meanwhile."""
        self._stats.reserved_bytes = memory_bytes

    @property
    def histogram(self) -> dict[int, int]:
        """Number of forwards so far, by the number of requests that shared them."""
        with self._lock:
            return {shared: served // shared for shared, served in sorted(self._served.items())}

    @property
    def waiting(self) -> int:
        """Calls that wait for the others or for the device now."""
        return len(self.queue.calls)

    def _forget(self, member: Member) -> None:
        with self._lock:
            self.queue.forget(member)
            self._ring_first()

    def _ring_first(self) -> None:
        """Have the first in the queue look whether its time has come."""
        if self.queue.calls and not self._busy:
            self.queue.calls[0].member.bell.ring()

    def _replacement(self, module: Any) -> Forward:
        forward: Forward = module.forward
        # That of the class: what libraries put over it hides the names of the arguments.
        names = tuple(method_signature(type(module).forward).parameters)

        @functools.wraps(forward)
        def meet(*args: Any, **kwargs: Any) -> Any:
            member: Member | None = getattr(self._local, "member", None)
            if member is None:
                return forward(*args, **kwargs)
            call, parts = Call(forward, args, kwargs, member, time.monotonic()), None
            if not member.alone:
                call.describe(names)
                if call.layout is not None:
                    with self._lock:
                        call.stats = self._stats.of(call)
                if call.requests > 1:
                    parts = call.parts()
            if parts:
                self._wait_for([part for part, _ in parts], member)
                call.gather(parts)
            else:
                self._wait_for([call], member)
            return call.result()

        return meet

    def _wait_for(self, calls: list[Call], member: Member) -> None:
        member.waits_for = len(calls)
        try:
            with self._lock:
                self.queue.join(calls, member)
                patience_s = self._run_what_is_due(member)
            while member.waits_for:
                member.bell.wait(patience_s)
                # All of a group wake at once: who is done does not queue for the lock again.
                if member.waits_for:
                    with self._lock:
                        patience_s = self._run_what_is_due(member)
            for call in calls:
                member.count(call.shared)
        finally:
            if member.waits_for:  # this thread was told to end while it waited
                with self._lock:
                    if self.queue.remove(calls):
                        self._ring_first()

    def _run_what_is_due(self, member: Member) -> float | None:
        """Run groups that are due until there is none, or until the calls of `member` are done.

        Whoever sees that a group is complete runs it, so that nobody need wake for it. Returns how
        long the thread of `member` may then sleep before it looks again; None is until it is woken.
        """
        while member.waits_for and not self._busy:
            group, patience_s = self.queue.next_group()
            if not group:
                return None
            if patience_s > 0:
                return patience_s if group[0].member is member else None
            self._run(group)
        return None

    def _run(self, group: list[Call]) -> None:
        """Run a group, with the lock open meanwhile."""
        self.queue.remove(group)
        self._busy = True
        # A lone request hands the device its next step early; of several, the next calls gather
        # while the device works, which shows only by waiting for it.
        several = self.queue.several
        self._lock.release()
        try:
            key = group[0].member.key
            if self._key == key or self._set_to(key, group):
                run_group(group, group[0].stats or BatchStats(), wait=several)
        finally:
            self._lock.acquire()
            for call in group:
                call.member.waits_for -= 1
                self._served[call.shared] += call.requests
                call.member.bell.ring()
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next use the denoisers: whoever waits to hold them, else the first call."""
        self.queue.free_since = time.monotonic()
        if self._holders:
            self._holders.popleft().ring()
        else:
            self._busy = False
            self._ring_first()

    def _set_to(self, key: Hashable, group: list[Call]) -> bool:
        """Set the denoisers to the key of `group`; where that fails its calls have failed."""
        try:
            self._key = _UNKNOWN
            self.switch(key)
            self._key = key
        except BaseException as error:  # noqa: BLE001 - raised in the threads whose calls they are
            for call in group:
                call.error = error
            return False
        return True
