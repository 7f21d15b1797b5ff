"""Where the videos of a question come from: below one directory, in the request itself, or, if allowed, the web.

Nothing of a client's opens a file elsewhere, a link included, and no address of this machine or network is fetched:
every address of a name is looked at before it is connected to, and again after each redirect.
"""

import asyncio
import base64
import binascii
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
import numpy as np
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from PIL import Image

from paravt_jax.asking.openai import BadRequest, Medium
from rollout.video.encode import write_video

MAX_FETCHED_BYTES = 2 * 2**30
FETCH_DEADLINE_S = 300.0
MAX_REDIRECTS = 3
MAX_IMAGE_PIXELS = 8192 * 4352
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
CHUNK_BYTES = 2**20


class PublicAddresses(AbstractResolver):
    """Names as the system knows them, without those that lead to this machine or network."""

    def __init__(self) -> None:
        self._system = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._system.resolve(host, port, family)
        if not all(is_public(one["host"]) for one in found):
            raise BadRequest(f"{host} is not on the public web", "messages")
        return found

    async def close(self) -> None:
        await self._system.close()


def is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_global and not ip.is_multicast


@dataclass(frozen=True)
class Sources:
    """What may be asked about."""

    video_root: Path | None  # of files; None: none may
    allow_fetch: bool

    async def path_of(self, medium: Medium, directory: Path, number: int) -> Path:
        """A file with a video. What has to be written for that is written into `directory`."""
        target = directory / f"{medium.kind}_{number}"
        scheme = urlsplit(medium.url).scheme
        if scheme == "data":
            await asyncio.to_thread(_write_data, medium.url, target)
        elif scheme in ("http", "https"):
            await self._fetch(medium.url, target)
        elif scheme in ("", "file"):
            target = self._below_root(unquote(urlsplit(medium.url).path) if scheme else medium.url)
        else:
            raise BadRequest(
                f"a URL of scheme {scheme!r} cannot be read; there are data, file, http, https", "messages"
            )
        return await asyncio.to_thread(_as_video, target, directory) if medium.kind == "image" else target

    def _below_root(self, name: str) -> Path:
        if self.video_root is None:
            raise BadRequest("files of this machine are not read: it was started without --video-root", "messages")
        if "\0" in name:
            raise BadRequest("there is no such file", "messages")
        path = (self.video_root / name).resolve()
        # One sentence for what is not there and what may not be seen: a client learns nothing of other files.
        if not path.is_relative_to(self.video_root.resolve()) or not path.is_file():
            raise BadRequest(f"there is no file {name!r} below the directory of videos", "messages")
        return path

    async def _fetch(self, url: str, target: Path) -> None:
        if not self.allow_fetch:
            raise BadRequest(
                "nothing is fetched from the web: this server was started without --allow-fetch", "messages"
            )
        connector = aiohttp.TCPConnector(resolver=PublicAddresses(), use_dns_cache=False)
        timeout = aiohttp.ClientTimeout(total=FETCH_DEADLINE_S)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
                await _download(session, url, target)
        except TimeoutError:
            raise BadRequest(f"{url} did not come in {FETCH_DEADLINE_S:.0f} s", "messages") from None
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            if isinstance(problem, BadRequest):
                raise
            raise BadRequest(f"{url} cannot be fetched: {problem or type(problem).__name__}", "messages") from None


async def _download(session: aiohttp.ClientSession, url: str, target: Path) -> None:
    for _ in range(MAX_REDIRECTS + 1):
        _check_literal(url)
        async with session.get(url, allow_redirects=False) as response:
            if response.status in (301, 302, 303, 307, 308):
                url = urljoin(url, response.headers.get("Location", ""))
                continue
            if response.status != 200:
                raise BadRequest(f"{url} answered {response.status}", "messages")
            with target.open("wb") as file:
                async for part in response.content.iter_chunked(CHUNK_BYTES):
                    if file.tell() + len(part) > MAX_FETCHED_BYTES:
                        raise BadRequest(f"{url} is larger than {MAX_FETCHED_BYTES >> 30} GiB", "messages")
                    file.write(part)
            return
    raise BadRequest(f"{url} redirects more than {MAX_REDIRECTS} times", "messages")


def _check_literal(url: str) -> None:
    """An address that stands in a URL itself is not resolved, and a redirect may lead to any scheme."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadRequest(f"{url} is no address of the web", "messages")
    try:
        public = is_public(parts.hostname)
    except ValueError:  # a name
        return
    if not public:
        raise BadRequest(f"{parts.hostname} is not on the public web", "messages")


def _write_data(url: str, target: Path) -> None:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadRequest("a data URL must be data:TYPE;base64,…", "messages")
    try:
        target.write_bytes(base64.b64decode(body, validate=True))
    except binascii.Error as problem:
        raise BadRequest(f"the base64 of a data URL is wrong: {problem}", "messages") from None


def _as_video(path: Path, directory: Path) -> Path:
    """A picture as a video of one second that shows it."""
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise BadRequest(f"a picture has {image.width} x {image.height} pixels, too many", "messages")
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
        if isinstance(problem, BadRequest):
            raise
        raise BadRequest("a picture cannot be read", "messages") from None
    height, width, _ = pixels.shape
    even = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), "edge")
    write_video(video := directory / f"{path.name}.mp4", [even], fps=1)
    return video
