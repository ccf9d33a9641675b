"""The lookup of a host's addresses, with a timeout: the system's own has none that can be set.

A name server that does not answer holds a lookup for ten seconds and more, which is what happens to
the name of a container that was stopped. So it is done in a thread that the caller stops waiting
for; those who ask for the same name meanwhile wait for the same lookup, so there is one thread for
each name at most.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
_Key = tuple[str, int, int]


def _by_the_system(host: str, port: int, family: int) -> list[Address]:
    return [*socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)]


class NameLookup:
    """Looks names up by ``ask``, which is handed host, port and address family."""

    def __init__(self, ask: Callable[[str, int, int], list[Address]] = _by_the_system) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._under_way: dict[_Key, Future[list[Address]]] = {}

    def addresses(
        self, host: str, port: int, family: int, timeout_s: float | None
    ) -> list[Address]:
        """Return the addresses of a host, as :func:`socket.getaddrinfo` does.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
            OSError: There is no such name, or nobody could say.
        """
        if _is_address(host):
            return self._ask(host, port, family)
        key = (host, port, family)
        with self._lock:
            found = self._under_way.get(key)
            if found is None:
                found = self._under_way[key] = Future()
                threading.Thread(
                    target=self._fulfil, args=(key, found), name=f"lookup of {host}", daemon=True
                ).start()
        try:
            return found.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the address of {host!r} was not found in time") from None

    def _fulfil(self, key: _Key, promised: Future[list[Address]]) -> None:
        try:
            promised.set_result(self._ask(*key))
        except Exception as error:  # noqa: BLE001 - it is raised where the lookup is waited for
            promised.set_exception(error)
        finally:
            with self._lock:
                del self._under_way[key]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
