"""Access control: an API key, and at a loopback address only clients on this machine.

A web page can make its visitor's browser connect here through a host name that resolves to 127.0.0.1 (DNS rebinding).
The browser then sends that name in Host or Origin, so requests with other names are rejected.
"""

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web

from paravt_jax.asking.openai import Refused

KEY_VARIABLE = "PARAVT_API_KEY"
WITHOUT_KEY = "--no-api-key"
OPEN_PATHS = ("/health",)  # load balancers have no key
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Door:
    key: str = ""  # empty: no key needed
    own_names: tuple[str, ...] = ()  # accepted besides loopback names if the server listens at loopback
    loopback_only: bool = True

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.loopback_only:
            self._check_names(request)
        if self.key and request.path not in OPEN_PATHS and not self._has_key(request):
            raise Refused(401, "the API key is missing or wrong", code="invalid_api_key")
        return await handler(request)

    def _check_names(self, request: web.Request) -> None:
        names = [("Host", f"//{host}") for host in request.headers.getall("Host", [])]
        names += [("Origin", origin) for origin in request.headers.getall("Origin", [])]
        for header, url in names:
            if not self._is_ours(url):
                raise Refused(
                    403,
                    f"this server is for its own machine, and {header} names another: ask it at 127.0.0.1, or let the "
                    f"proxy before it send that as Host",
                    code="foreign_host",
                )

    def _is_ours(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return name in self.own_names or is_loopback(name)

    def _has_key(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # constant-time comparison, so response times reveal nothing about the key
        same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self.key.encode())
        return same and scheme.lower() == "bearer"


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def door_of(place: socket.socket, host: str, key: str, without_key: bool) -> Door:
    """For a server that listens at `place`; `host` is the user's name for it."""
    if key and (without_key or not key.isascii() or not key.isprintable() or " " in key):
        said = f"be given beside {WITHOUT_KEY}" if without_key else "have spaces or other than ASCII characters"
        raise ValueError(f"an API key, by --api-key or {KEY_VARIABLE}, cannot {said}")
    loopback_only = ipaddress.ip_address(place.getsockname()[0]).is_loopback
    if not loopback_only and not key and not without_key:
        raise ValueError(
            f"--host {host} lets other machines ask: give them a key with {KEY_VARIABLE}=… or --api-key, or say "
            f"{WITHOUT_KEY} if whoever reaches this machine may"
        )
    return Door(key, (host.lower(),), loopback_only)
