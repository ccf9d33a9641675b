"""The supervisor: starts the parts, restarts those that end, and stops them all."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.launcher.child_process import Backoff, ChildProcess
from scripts.launcher.parts import Part


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP: the first one asks to stop, a second one to hurry."""

    def __init__(self) -> None:
        """Take over the signals; a SIGHUP that was ignored (``nohup``) stays ignored."""
        self._event = threading.Event()
        self._times = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def wait(self, seconds: float) -> bool:
        """Wait for the first signal, but not longer than ``seconds``; whether it has come."""
        return self._event.wait(seconds)

    def has_come(self) -> bool:
        return self._event.is_set()

    def hurry(self) -> bool:
        """Whether there was more than one."""
        return self._times > 1

    def _note(self, *_: object) -> None:
        self._times += 1
        self._event.set()


_LOG_TAIL_BYTES = 8192


# What a part does until it is ready is said so often, if it has changed.
_SAY_EVERY_S = 10.0


_LOG_LINE_CHARS = 300


class SupervisedPart:
    """A part under supervision, and the process that runs it now, if one does.

    Attributes:
        part: The plan.
        process: Its process; None while it waits for its next start.
        ready: Whether that process has been seen ready.
        final: Whether it has ended for good.
        tried: Whether any process of it has been ready or has failed.
    """

    def __init__(self, part: Part, log: Path, backoff: Backoff) -> None:
        """Plan a start at once."""
        self.part = part
        self.log = log
        self.backoff = backoff
        self.process: ChildProcess | None = None
        self.ready = False
        self.tried = False
        self.final = False
        self.said: str | None = None
        self.said_at = 0.0
        self.start_at = 0.0
        self.started_at = 0.0
        self.ready_at = 0.0
        self.explained = False


class Supervisor:
    """Starts parts, and starts again those that end."""

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        folder: Path,
        logs: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        """Start nothing yet.

        Args:
            environment: What every part inherits.
            folder: Where every part is started.
            logs: The folder of the parts' logs; must exist.
            say: Prints one line to people.
            clock: Seconds that never go back.
            backoff: Makes the pauses between the starts of one part.
        """
        self.members: list[SupervisedPart] = []
        self._environment = environment
        self._folder = folder
        self._logs = logs
        self._say = say
        self._clock = clock
        self._backoff = backoff

    def start(self, parts: Sequence[Part]) -> None:
        """Start the parts, and look after them from now on."""
        for part in parts:
            member = SupervisedPart(part, self._logs / f"{part.name}.log", self._backoff())
            self.members.append(member)
            self._start(member)

    def look(self) -> None:
        """Look at each part once: say what has become ready or ended, start what is due."""
        for member in self.members:
            if member.process is None:
                if not member.final and self._clock() >= member.start_at:
                    self._start(member)
            elif (status := member.process.poll()) is not None:
                self._ended(member, status)
            elif not member.ready:
                self._ask(member, member.process.pid)

    def _start(self, member: SupervisedPart) -> None:
        part = member.part
        merged = {**self._environment, **part.environment}
        member.ready, member.explained = False, False
        member.started_at = member.said_at = self._clock()
        member.said = None
        try:
            member.process = ChildProcess(
                part.command,
                environment={name: value for name, value in merged.items() if value is not None},
                folder=self._folder,
                log=member.log,
                orphan_signal=part.orphan_signal,
            )
        except OSError as error:
            self._start_later(member, f"cannot be started: {error}")

    def _ask(self, member: SupervisedPart, pid: int) -> None:
        name = member.part.name
        if (what := member.part.ready(pid)) is not None:
            member.ready = member.tried = True
            member.ready_at = self._clock()
            took_s = member.ready_at - member.started_at
            self._say(f"{name} ready: {what}, up in {took_s:.1f} s (pid {pid})")
        elif not member.explained and (reason := member.part.failure(pid)) is not None:
            member.explained = member.tried = True
            self._say(f"{name} failed: {reason}")
        elif not member.explained and self._clock() - member.said_at >= _SAY_EVERY_S:
            member.said_at = self._clock()
            doing = member.part.activity(pid)
            if doing is not None and doing != member.said:
                member.said = doing
                self._say(f"{name}: {doing}")

    def _ended(self, member: SupervisedPart, status: int) -> None:
        pid = member.process.pid if member.process else 0
        what = f"ended with {_spelled(status)}"
        if status > 0 and not member.explained:
            # A signal explains itself; for an exit the part or its log knows more.
            reason = member.part.failure(pid)
            if reason is not None:
                what = f"failed: {reason}"
            elif (line := last_line(member.log)) is not None:
                what = f"{what}: {line}"
        if status in member.part.final_exits:
            member.process, member.ready, member.tried, member.final = None, False, True, True
            self._say(
                f"{member.part.name} {what}; not started again;"
                " restart the service once that is fixed"
            )
        else:
            self._start_later(member, what)

    def _start_later(self, member: SupervisedPart, what: str) -> None:
        now = self._clock()
        pause_s = member.backoff.pause(now - member.ready_at if member.ready else 0.0)
        member.process, member.ready, member.tried = None, False, True
        member.start_at = now + pause_s
        self._say(f"{member.part.name} {what}; starting again in {pause_s:g} s")


def last_line(log: Path) -> str | None:
    """Return the last line of a log that says something, shortened; None where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_TAIL_BYTES))
            tail = file.read().decode("utf-8", errors="replace")
    except OSError:
        return None
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1][:_LOG_LINE_CHARS] if lines else None


def _spelled(status: int) -> str:
    if status >= 0:
        return f"code {status}"
    described = signal.strsignal(-status)
    return f"signal {-status}{f' ({described.lower()})' if described else ''}"


HURRY_S = 1.0  # every grace, after a second signal


_KILL_S = 1.0


_PAUSE_S = 0.02


@dataclass(frozen=True)
class Shutdown:
    """How the parts are stopped.

    Attributes:
        hurried: Whether there was a second signal.
        say: Prints one line to people.
        clock: Seconds that never go back.
        sleep: Waits for so many seconds.
    """

    hurried: Callable[[], bool]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def stop(self, members: Sequence[SupervisedPart]) -> None:
        """Stop all parts: in their order, and the ones of one order together.

        A part with a head start ends beside those of the next order, and has its own grace for it.
        """
        ending: dict[SupervisedPart, float] = {}  # with the moment at which each is killed
        for order in sorted({member.part.stop_order for member in members}):
            asked_at = self.clock()
            limits = ending
            ending = {}
            for member in members:
                if member.part.stop_order != order or member.process is None:
                    continue
                member.process.terminate()
                part = member.part
                if part.head_start_s is None:
                    limits[member] = asked_at + part.grace_s
                else:
                    ending[member] = asked_at + part.grace_s
            starts = {member: asked_at + (member.part.head_start_s or 0.0) for member in ending}
            self._wait(limits | starts, asked_at)
            self._kill(limits)
        self._wait(ending, self.clock())
        self._kill(ending)

    def _wait(self, limits: Mapping[SupervisedPart, float], asked_at: float) -> None:
        """Wait until each has ended or its moment is over."""
        while True:
            now = self.clock()
            hurried = self.hurried() and now - asked_at >= HURRY_S
            if hurried or not any(now < limit and _runs(each) for each, limit in limits.items()):
                return
            self.sleep(_PAUSE_S)

    def _kill(self, members: Iterable[SupervisedPart]) -> None:
        late = [member for member in members if _runs(member)]
        for member in late:
            if member.process is not None:
                self.say(f"{member.part.name} did not stop in time and is killed")
                member.process.kill()
        now = self.clock()
        self._wait(dict.fromkeys(late, now + _KILL_S), now)


def _runs(member: SupervisedPart) -> bool:
    return member.process is not None and member.process.poll() is None
