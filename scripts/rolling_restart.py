"""Restart replicas one by one, without a failed request: ``python -m scripts.rolling_restart``.

Each restarts once the one before it is ready again. Whatever started the processes, such as
`scripts/serve.py`, must start them again after exit code 0.

Exit codes: 0, all were restarted; 1, one did not come back; 2, nothing was restarted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from configs.errors import ConfigurationError
from configs.fields import choices
from configs.settings import load_settings
from scripts.api_client import ApiClient, NoAnswer, Refused, complain, say
from scripts.launcher.parts import base_url, reachable

_LOOK_EVERY_S: Final = 0.5
_SERVING: Final = {"ready", "draining"}


class Stopped(Exception):
    """Raised where the roll cannot go on; the replicas that were not reached serve as before."""


@dataclass(frozen=True)
class RollingRestart:
    """How the replicas are restarted.

    Attributes:
        api: The API.
        drain_s: Seconds that a running request may go on before it is handed to another replica.
        timeout_s: Seconds a replica may take, after that, to end and to be ready again.
        say: Prints one line.
        clock: Seconds that never go back.
        sleep: Waits for so many seconds.
    """

    api: ApiClient
    drain_s: float
    timeout_s: float
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def choose(self, names: Sequence[str], *, force: bool) -> list[str]:
        """Return the names of those to restart; all that run, unless ``names`` says otherwise.

        Raises:
            Stopped: One is unknown, none runs, or one is all there is of its stage.
            NoAnswer, Refused: As the API says.
        """
        found = {replica["name"]: replica for replica in self.api.replicas()}
        if unknown := [name for name in names if name not in found]:
            known = choices(found) if found else "one that runs"
            raise Stopped(f"{', '.join(unknown)} is not a replica; use {known}")
        chosen = [found[name] for name in dict.fromkeys(names or found)]
        for replica in chosen:
            if replica["state"] not in _SERVING:
                self.say(f"{replica['name']}: skipped, it is {replica['state']}")
        running = [replica for replica in chosen if replica["state"] in _SERVING]
        if not running:
            raise Stopped("no replica is ready, so there is nothing to restart")
        for replica in running:
            if not force and not _is_covered(replica, list(found.values())):
                raise Stopped(
                    f"{replica['name']} is the only ready replica of {_stage(replica)}; new "
                    "requests would get 503 while it restarts. Start a second one, or use --force"
                )
        return [replica["name"] for replica in running]

    def roll(self, names: Sequence[str], *, force: bool) -> None:
        """Restart the named replicas, each once the one before is ready.

        Raises:
            Stopped: One did not come back, or no other of its stage is ready any more.
            Refused: As the API says.
        """
        started = self.clock()
        for number, name in enumerate(names, 1):
            before = self._covered(name, force=force)
            self.say(
                f"{name}: restarting ({number} of {len(names)}), "
                f"{before['running']} running, {before['waiting']} waiting"
            )
            self._insist(lambda name=name: self.api.restart(name, self.drain_s))  # type: ignore[misc]
            self._follow(before)
        self.say(f"restarted {len(names)} in {self.clock() - started:.0f} s")

    def _covered(self, name: str, *, force: bool) -> dict[str, Any]:
        """Return a replica once it may go: another one of its stage is ready."""
        deadline = self.clock() + self.timeout_s
        while True:
            found = self._insist(self.api.replicas)
            replica = _named(found, name)
            if replica is None or replica["state"] not in _SERVING:
                raise Stopped(f"{name} is now {replica['state'] if replica else 'unknown'}")
            if force or _is_covered(replica, found):
                return replica
            if self.clock() >= deadline:
                raise Stopped(
                    f"no other replica of {_stage(replica)} is ready within {self.timeout_s:g} s; "
                    f"{name} was not touched"
                )
            self.sleep(_LOOK_EVERY_S)

    def _follow(self, before: dict[str, Any]) -> None:
        """Return once another process of the replica is ready."""
        name, started, said = before["name"], self.clock(), ""
        deadline = started + self.drain_s + self.timeout_s
        ended = False
        while True:
            now = _named(self._insist(self.api.replicas), name) or {**before, "state": "gone"}
            if not ended and (now["state"] not in _SERVING or _process(now) != _process(before)):
                # It needs no more of its time to drain.
                ended, deadline = True, self.clock() + self.timeout_s
            line = _progress(before, now)
            if line != said:
                said = line
                self.say(f"{name}: {line}, after {self.clock() - started:.1f} s")
            if _process(now) != _process(before) and now["state"] in _SERVING:
                return
            if self.clock() >= deadline:
                raise Stopped(
                    f"{name} was not ready again within {self.timeout_s:g} s: {line}; check that "
                    "its supervisor starts it again after exit code 0"
                )
            self.sleep(_LOOK_EVERY_S)

    def _insist(self, call: Callable[[], Any]) -> Any:
        """Repeat a call while the API does not answer: it may be restarting."""
        deadline = self.clock() + self.timeout_s
        while True:
            try:
                return call()
            except NoAnswer as away:
                if self.clock() >= deadline:
                    raise Stopped(f"the API does not answer: {away}") from away
                self.sleep(_LOOK_EVERY_S)


def _is_covered(replica: dict[str, Any], found: Sequence[dict[str, Any]]) -> bool:
    """Whether its stage goes on serving without it; one that is drained is not missed."""
    return replica["state"] != "ready" or any(
        other["state"] == "ready"
        and other["stage"] == replica["stage"]
        and other["name"] != replica["name"]
        for other in found
    )


def _progress(before: dict[str, Any], now: dict[str, Any]) -> str:
    state: str = now["state"]
    if state == "gone":
        return "its process has ended"
    if state == "failed":
        return f"its process failed: {now['error']}"
    if _process(now) == _process(before):
        return f"{now['running']} still running"
    return "ready again, still drained" if state == "draining" else f"its new process is {state}"


def _named(found: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((replica for replica in found if replica["name"] == name), None)


def _process(replica: dict[str, Any]) -> tuple[Any, ...]:
    return replica["host"], replica["pid"], replica["started_at"]


def _stage(replica: dict[str, Any]) -> str:
    return f"stage {replica['stage']} ({replica['model']})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Restart the replicas; return the exit code."""
    try:
        options = _parser().parse_args(arguments)
    except ConfigurationError as refused:
        complain(str(refused))
        return 2
    api = ApiClient(options.url.rstrip("/"), options.api_key)
    rolling = RollingRestart(api, options.drain_s, options.timeout, say)
    try:
        chosen = rolling.choose(options.names, force=options.force)
    except (Stopped, NoAnswer, Refused) as error:
        complain(str(error))
        return 2
    try:
        rolling.roll(chosen, force=options.force)
    except (Stopped, Refused) as error:
        complain(f"{error}. The other replicas were not restarted.")
        return 1
    return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to 86400 seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    settings = load_settings()
    url = base_url(reachable(settings.api_host), settings.api_port)
    parser = argparse.ArgumentParser(
        prog="python -m scripts.rolling_restart",
        description="Restart replicas one by one, without a failed request.",
    )
    parser.add_argument("names", metavar="REPLICA", nargs="*", help="which ones (default: all)")
    parser.add_argument("--url", default=url, help=f"of the API (default: {url})")
    parser.add_argument(
        "--api-key", default=settings.api_key, help="key of the API (default: API_KEY)"
    )
    parser.add_argument(
        "--drain-s",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a running request may go on before it moves (default: 600)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=900.0,
        metavar="SECONDS",
        help="how long a replica may take to be ready again (default: 900)",
    )
    parser.add_argument(
        "--force", action="store_true", help="also restart the only ready replica of a stage"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
