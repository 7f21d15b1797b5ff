"""Access control: an API key, and only local clients if the server listens at a loopback address.

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

from paravt_jax.asking.openai import RequestError
from rollout.engine.http import is_loopback

KEY_VARIABLE = "PARAVT_API_KEY"
WITHOUT_KEY = "--no-api-key"
OPEN_PATHS = ("/health",)  # load balancers have no key
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class AccessControl:
    key: str = ""  # empty: clients need no key
    host_names: tuple[str, ...] = ()  # accepted besides loopback names if the server listens at loopback
    loopback_only: bool = True

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.loopback_only:
            self._check_names(request)
        if self.key and request.path not in OPEN_PATHS and not self._has_key(request):
            raise RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
        return await handler(request)

    def _check_names(self, request: web.Request) -> None:
        names = [("Host", f"//{host}") for host in request.headers.getall("Host", [])]
        names += [("Origin", origin) for origin in request.headers.getall("Origin", [])]
        for header, url in names:
            if not self._is_ours(url):
                raise RequestError(
                    403,
                    f"this server accepts only clients on its own machine, and {header} names another host; connect "
                    "to 127.0.0.1, or set the header to 127.0.0.1 in your proxy",
                    code="foreign_host",
                )

    def _is_ours(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return name in self.host_names or is_loopback(name)

    def _has_key(self, request: web.Request) -> bool:
        scheme, _, client_key = request.headers.get("Authorization", "").partition(" ")
        # constant-time comparison, so response times reveal nothing about the key
        is_equal = hmac.compare_digest(client_key.strip().encode(errors="surrogateescape"), self.key.encode())
        return is_equal and scheme.lower() == "bearer"


def access_control(listener: socket.socket, host: str, key: str, without_key: bool) -> AccessControl:
    """Makes the access control of a server. `host` is the user's name for the address of `listener`."""
    if key and without_key:
        raise ValueError(f"an API key (--api-key or {KEY_VARIABLE}) and {WITHOUT_KEY} cannot be combined")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"an API key (--api-key or {KEY_VARIABLE}) must be printable ASCII without spaces")
    loopback_only = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    if not loopback_only and not key and not without_key:
        raise ValueError(
            f"--host {host} accepts other machines: set a key with {KEY_VARIABLE}=… or --api-key, or pass "
            f"{WITHOUT_KEY} to serve everyone who can reach this machine"
        )
    return AccessControl(key, (host.lower(),), loopback_only)
