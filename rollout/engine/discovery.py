"""Which servers there are: as a file says, which may change, or an sglang-router that stands before them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollout.engine.http import HttpClient


def listed_urls(file: str | Path) -> list[str]:
    """Of a file with a URL on each line; empty lines and those that begin with # say nothing."""
    lines = [line.strip() for line in Path(file).read_text().splitlines()]
    urls = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            check_url(f"line {number} of {file}", line)
    if not urls:
        raise ValueError(f"{file} lists no server; write the URL of each on a line of its own")
    return list(dict.fromkeys(urls))


def check_url(name: str, url: str) -> None:
    """`name` is where it stands. The URL is not repeated: what has a password in it would be printed and logged."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is not None and "@" in parts.netloc:
        raise ValueError(
            f"{name} has a user or password in it, which would be written into logs and the run's files; leave it out"
        )
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{name} is no URL, such as http://10.0.0.2:30000")


async def urls_behind(client: HttpClient, router: str, deadline_s: float) -> list[str]:
    told = await client.get(f"{router}/workers", deadline_s)
    try:
        urls = [worker["url"].rstrip("/") for worker in told["workers"]]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{router} is no sglang-router: {router}/workers lists no servers") from None
    if not urls:
        raise ValueError(f"{router} is an sglang-router without servers; start it with --worker-urls")
    for number, url in enumerate(urls, 1):
        check_url(f"server {number} behind {router}", url)
    return list(dict.fromkeys(urls))


async def router_among(urls: Sequence[str], deadline_s: float) -> tuple[str, list[str]]:
    """A router with the servers behind it; or no router, and the servers. Who does not answer is taken for a server."""
    for number, url in enumerate(urls, 1):
        check_url(f"URL {number} of the engine", url)
    client = HttpClient.make()
    try:
        asked = (client.get(f"{url}/workers", deadline_s) for url in urls)
        told = await asyncio.gather(*asked, return_exceptions=True)
        routers = [url for url, one in zip(urls, told, strict=True) if isinstance(one, dict) and "workers" in one]
        if not routers:
            return "", list(urls)
        if len(urls) > 1:
            raise ValueError(f"{routers[0]} is an sglang-router, and has servers of its own: name it alone, not {urls}")
        return routers[0], await urls_behind(client, routers[0], deadline_s)
    finally:
        await client.close()
