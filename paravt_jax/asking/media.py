"""Gets the videos and images of a question: local files in one directory, data in the request, or, if allowed, URLs.

Clients cannot open other files, not even through links, and cannot fetch from this machine or its network: each address
is checked when its socket is created, after IDNA, DNS and redirects, so that the spelling of a URL does not matter.
"""

import asyncio
import base64
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit

import aiohttp
from PIL import Image

from paravt_jax.asking.openai import RETRY_S, BadRequest, Kind, Medium, RequestError, cut
from rollout.picture import IMAGE_FORMATS, IMAGE_SLOTS, MAX_IMAGE_PIXELS
from rollout.threads import in_daemon_thread
from rollout.toolbox.subtitles import subtitles_beside

MAX_FETCHED_BYTES = 2 * 2**30  # per request
MAX_ALL_FETCHED_BYTES = 8 * 2**30  # over all requests in progress
FETCH_DEADLINE_S = 300.0
MAX_REDIRECTS = 3
MAX_IMAGE_ASPECT = 200  # longer side / shorter side; the model's frame sizes allow no more
CHUNK_BYTES = 2**20
MAX_URL_CHARS = 2**14  # except data: URLs; limits the memory of libraries that cache parsed URLs
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class NotPublic(OSError):
    """Raised for an address that is not on the public internet."""


def public_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """Creates the socket for a connection, if its address is public."""
    family, kind, protocol, _, address = info
    if not is_public(str(address[0])):
        raise NotPublic("not on the public internet")
    return socket.socket(family, kind, protocol)


def is_public(address: str) -> bool:
    """Whether an address is public. IPv6 must be global unicast, or embed a public IPv4 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ipv4 = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else ip.ipv4_mapped
        if ipv4 is None:
            return ip in GLOBAL_UNICAST and ip not in SIX_TO_FOUR and ip.is_global and not is_own(address)
        ip = ipv4
    return ip.is_global and not ip.is_multicast and not is_own(str(ip))


def is_own(address: str) -> bool:
    """Whether the address belongs to this machine: then packets to it have the same source address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route, suppress(OSError):
        route.connect((address, 9))  # sends no packet
        return ipaddress.ip_address(route.getsockname()[0]) == ipaddress.ip_address(address)
    return False


@dataclass
class DiskBudget:
    """Limits the disk space of fetched files."""

    free_bytes: int

    def take(self, num_bytes: int) -> bool:
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        return True


@dataclass(frozen=True)
class Sources:
    """The videos and images that clients may use."""

    video_root: Path | None  # directory of the videos that clients may name; None: no files
    allow_fetch: bool
    directory: Path | None = None  # for clients' files; None: the system's temporary directory
    budget: DiskBudget = field(default_factory=lambda: DiskBudget(MAX_ALL_FETCHED_BYTES))

    @asynccontextmanager
    async def files_of(self, media: Sequence[Medium]) -> AsyncIterator[dict[Kind, list[str]]]:
        """Yields a file per medium, by kind. The files exist while the context is open."""
        budget = DiskBudget(MAX_FETCHED_BYTES)
        with TemporaryDirectory(prefix="paravt_", dir=self.directory) as directory:
            try:
                files: dict[Kind, list[str]] = {"video": [], "image": []}
                for number, medium in enumerate(media):
                    path = await self._path_of(medium, Path(directory) / str(number), budget)
                    files[medium.kind].append(str(path))
                yield files
            finally:
                self.budget.free_bytes += MAX_FETCHED_BYTES - budget.free_bytes

    async def _path_of(self, medium: Medium, target: Path, budget: DiskBudget) -> Path:
        """Returns a medium's file; creates it at `target` if it is not a local file."""
        source = target
        try:
            parts = urlsplit(medium.url[:MAX_URL_CHARS])
        except ValueError:
            raise BadRequest(f"{cut(medium.url)} is not a URL") from None
        if parts.scheme == "data":
            await asyncio.to_thread(_write_data, medium.url, target)
        elif len(medium.url) > MAX_URL_CHARS:
            raise BadRequest(f"{cut(medium.url)} has more than {MAX_URL_CHARS} characters")
        elif parts.scheme in ("http", "https"):
            await self._fetch(medium.url, target, budget)
        elif parts.scheme in ("", "file"):
            name = unquote(parts.path) if parts.scheme else medium.url
            source = await in_daemon_thread(lambda: self._file_below_root(name))  # a network disk can hang
        else:
            raise BadRequest(f"unknown URL scheme {cut(parts.scheme)}; use data, file, http or https")
        if medium.kind == "image":
            await in_daemon_thread(lambda: _check_image(source))
        return source

    def _file_below_root(self, name: str) -> Path:
        if self.video_root is None:
            raise BadRequest("this server reads no files: it was started without --video-root")
        # Missing and forbidden files give the same error, so that clients learn nothing about other files.
        with suppress(OSError, ValueError, RuntimeError):  # invalid names, circular links
            path = (self.video_root / name).resolve()
            if path.is_relative_to(self.video_root.resolve()) and path.is_file():
                return path
        raise BadRequest(f"no file {cut(name)} in the video directory")

    async def subtitles_of(self, videos: Sequence[str]) -> list[str]:
        """The subtitle file beside each video, within the video directory; "" for a video without one."""
        return await in_daemon_thread(lambda: list(map(self._subtitles_beside, videos)))

    def _subtitles_beside(self, video: str) -> str:
        with suppress(BadRequest):
            return str(self._file_below_root(str(subtitles_beside(video))))
        return ""

    async def _fetch(self, url: str, target: Path, budget: DiskBudget) -> None:
        if not self.allow_fetch:
            raise BadRequest("this server fetches nothing from the web: it was started without --allow-fetch")
        connector = aiohttp.TCPConnector(socket_factory=public_socket, use_dns_cache=False)
        timeout = aiohttp.ClientTimeout(total=FETCH_DEADLINE_S)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
                await self._download(session, url, target, budget)
        except TimeoutError:
            raise BadRequest(f"{cut(url)} took longer than {FETCH_DEADLINE_S:.0f} s") from None
        except aiohttp.ClientConnectorError as problem:
            is_private = isinstance(problem.os_error, NotPublic)
            reason = "is not on the public internet" if is_private else "cannot be reached"
            raise BadRequest(f"{cut(problem.host)} {reason}") from None
        except aiohttp.TooManyRedirects:
            raise BadRequest(f"{cut(url)} redirects more than {MAX_REDIRECTS} times") from None
        except aiohttp.NonHttpUrlClientError:
            raise BadRequest(f"{cut(url)} is not an http or https URL") from None
        except ValueError:
            raise BadRequest(f"{cut(url)} is not a URL") from None
        except aiohttp.ClientError as problem:  # other OSErrors are about the file
            raise BadRequest(f"{cut(url)} cannot be fetched: {type(problem).__name__}") from None

    async def _download(self, session: aiohttp.ClientSession, url: str, target: Path, budget: DiskBudget) -> None:
        async with session.get(url, max_redirects=MAX_REDIRECTS + 1) as response:  # the last redirect raises
            if response.status != 200:
                raise BadRequest(f"{cut(url)} returned HTTP {response.status}")
            with target.open("wb") as file:
                async for part in response.content.iter_chunked(CHUNK_BYTES):
                    if not budget.take(len(part)):
                        raise BadRequest(f"the files of this request are larger than {MAX_FETCHED_BYTES >> 30} GiB")
                    if not self.budget.take(len(part)):
                        budget.free_bytes += len(part)
                        raise RequestError(503, "other requests are fetching too much", "unavailable", RETRY_S)
                    file.write(part)


def _write_data(url: str, target: Path) -> None:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadRequest("a data URL must be data:TYPE;base64,…")
    try:
        target.write_bytes(base64.b64decode(body, validate=True))
    except ValueError:
        raise BadRequest("a data URL has invalid base64") from None


def _check_image(path: Path) -> None:
    """Raises BadRequest unless the image's header is readable and has a size that models accept."""
    try:
        with IMAGE_SLOTS, Image.open(path, formats=IMAGE_FORMATS) as image:
            width, height = image.size
    except MemoryError:
        raise
    except Exception:  # Pillow raises undocumented types
        raise BadRequest("an image cannot be read") from None
    short, long = sorted((width, height))
    if short * long > MAX_IMAGE_PIXELS or long > MAX_IMAGE_ASPECT * short:
        raise BadRequest(f"an image of {width} x {height} pixels is too large or too narrow")
