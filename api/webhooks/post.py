"""Posts a webhook to an address that a client chose, and to no address that is not public.

The name is resolved here, each address is judged, and the connection goes to one that was judged:
a name that resolves differently a moment later gains nothing. Redirects are not followed and no
proxy is used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

TIMEOUT_S: Final = 10.0
_PORTS: Final = {"http": 80, "https": 443}
_LOCAL_NAMES: Final = (".localhost", ".local", ".internal")


class DeliveryRefused(Exception):
    """Raised where an address must not be posted to; trying again would not help."""


def address_fault(url: str, *, allow_private: bool) -> str | None:
    """Return what is wrong with a webhook's address, as far as the address itself says."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "is not a URL"
    if parts.scheme not in _PORTS or not host or port == 0 or not url.isascii():
        return "is not an http:// or https:// URL with a host, in ASCII"
    if not url.isprintable() or " " in url:
        return "contains a space or a control character; encode it, such as %20"
    if parts.username is not None or parts.password is not None:
        return "contains a name or password; put it into the path or query"
    if not allow_private and _says_private(host):
        return f"points at {host}, which is not public"
    return None


def _says_private(host: str) -> bool:
    """Whether the host itself says so; a name may still resolve to a private address."""
    if host == "localhost" or host.endswith(_LOCAL_NAMES):
        return True
    try:
        return not _is_public(host)
    except ValueError:
        return False


def post(url: str, body: bytes, headers: Mapping[str, str], *, allow_private: bool) -> int:
    """Post `body` and return the status of the answer.

    Raises:
        DeliveryRefused: The address is not public, or none to post to.
        OSError: It could not be reached, or did not answer in time.
        http.client.HTTPException: It did not answer in HTTP.
    """
    fault = address_fault(url, allow_private=allow_private)
    if fault:
        raise DeliveryRefused(fault)
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or _PORTS[parts.scheme]
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.sock = _dial(host, port, secure=parts.scheme == "https", private=allow_private)
    try:
        path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        connection.request("POST", path, body=body, headers={**headers, "Host": parts.netloc})
        return connection.getresponse().status
    finally:
        connection.close()


def _dial(host: str, port: int, *, secure: bool, private: bool) -> socket.socket:
    addresses = {
        str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    }
    if not private and not all(_is_public(address) for address in addresses):
        raise DeliveryRefused(f"{host} resolves to an address that is not public")
    failure: OSError | None = None
    for address in sorted(addresses):
        try:
            plain = socket.create_connection((address, port), timeout=TIMEOUT_S)
        except OSError as error:
            failure = error
            continue
        if not secure:
            return plain
        try:
            return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        except OSError:
            plain.close()
            raise
    raise failure or OSError(f"{host} has no address")


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    found = mapped or found
    return found.is_global and not found.is_multicast
