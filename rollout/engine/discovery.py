"""Reads the list of servers from a file or from an sglang-router."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from rollout.engine.http import HttpClient, ServerUnreachable
from rollout.engine.protocol import DeadlineExceeded, EngineError

PROBE_DEADLINE_S = 5.0
NO_URL = "is not a URL such as http://10.0.0.2:30000"


def listed_urls(file: str | Path) -> list[str]:
    """Reads URLs from a file with one URL per line; skips empty lines and lines that start with #."""
    try:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text; write one URL per line") from None
    urls = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            check_url(f"line {number} of {file}", line)
    if not urls:
        raise ValueError(f"{file} lists no server; write one URL per line")
    return list(dict.fromkeys(urls))


def check_url(name: str, url: str) -> None:
    """Raises a ValueError unless it is the URL of an HTTP server without a user or password."""
    parts = check_no_password(name, url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{name} {NO_URL}")


def check_no_password(name: str, url: str, remedy: str = "") -> SplitResult:
    """Splits a URL. Raises a ValueError if it is invalid or contains a user or password.

    `name` says where the URL comes from. Errors never repeat the URL itself, because it may contain a password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number up to 65535
    except ValueError:
        raise ValueError(f"{name} {NO_URL}") from None
    if "@" in parts.netloc:
        raise ValueError(
            f"{name} contains a user name or password, which would be written to logs and the run's files; remove it"
            f"{remedy}"
        )
    return parts


async def unreachable(urls: Sequence[str]) -> list[str]:
    """Returns one problem for each URL where nothing answers within a few seconds."""

    async def why_unreachable(url: str) -> str:
        try:
            await client.get(f"{url}/model_info", PROBE_DEADLINE_S)
        except (ServerUnreachable, DeadlineExceeded) as error:
            return str(error)
        except EngineError:
            """Something answers, for example a router."""
        return ""

    async with HttpClient() as client:
        return list(filter(None, await asyncio.gather(*map(why_unreachable, urls))))


async def urls_behind(client: HttpClient, router: str, deadline_s: float) -> list[str]:
    answer = await client.get(f"{router}/workers", deadline_s)
    try:
        urls = [worker["url"].rstrip("/") for worker in answer["workers"]]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{router} is not an sglang-router: {router}/workers lists no servers") from None
    if not urls:
        raise ValueError(f"{router} is an sglang-router without servers; start it with --worker-urls")
    for number, url in enumerate(urls, 1):
        check_url(f"server {number} behind {router}", url)
    return list(dict.fromkeys(urls))


async def router_among(urls: Sequence[str], deadline_s: float) -> tuple[str, list[str]]:
    """Returns a router's URL and the servers behind it, or "" and `urls`. A URL that does not answer is a server."""
    for number, url in enumerate(urls, 1):
        check_url(f"URL {number} of the engine", url)
    async with HttpClient() as client:
        calls = (client.get(f"{url}/workers", deadline_s) for url in urls)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        routers = [url for url, a in zip(urls, answers, strict=True) if isinstance(a, dict) and "workers" in a]
        if not routers:
            return "", list(urls)
        if len(urls) > 1:
            raise ValueError(f"{routers[0]} is an sglang-router with its own servers: name it alone, not {urls}")
        return routers[0], await urls_behind(client, routers[0], deadline_s)
