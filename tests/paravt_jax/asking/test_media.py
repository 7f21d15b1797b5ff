"""A client reads no file outside the video directory and reaches no private address, in any spelling."""

import asyncio
import base64
import errno
import gc
import io
import tracemalloc
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from async_tests import async_test
from PIL import Image

from paravt_jax.asking import media as media_module
from paravt_jax.asking.media import DiskBudget, Sources, is_own, is_public
from paravt_jax.asking.openai import BadRequest, Medium, RequestError


def read_all(sources, *media, read=lambda path: path):
    """Applies `read` to each source's file while it exists."""

    async def files():
        async with sources.files_of(media) as files:
            return [read(Path(path)) for paths in files.values() for path in paths]

    return asyncio.run(files())


def path_of(url, tmp_path, kind="video", read=lambda path: path, **media):
    sources = Sources(media.get("video_root"), media.get("allow_fetch", False), tmp_path)
    return read_all(sources, Medium(kind, url), read=read)[0]


def test_only_files_below_the_directory_are_read(videos, tmp_path):
    (tmp_path / "secret").write_text("x")
    (videos / "link.mp4").symlink_to(tmp_path / "secret")
    (videos / "loop").symlink_to(videos / "pool")
    (videos / "pool").symlink_to(videos / "loop")
    names = ("a.mp4", f"{videos}/a.mp4", f"file://{videos}/a.mp4", f"file://{videos}/%61.mp4", "../videos/a.mp4")
    for url in names:
        assert path_of(url, tmp_path, video_root=videos) == videos / "a.mp4"
    outside = ("../secret", f"{tmp_path}/secret", "link.mp4", f"file://{videos}/%2e%2e/secret", "none.mp4", ".", "a\0b")
    impossible = ("loop", "loop/a.mp4", "a" * 300, "a/" * 3000, "\ud800", "a.mp4/b")
    for url in (*outside, *impossible):
        with pytest.raises(BadRequest, match="no file") as raised:
            path_of(url, tmp_path, video_root=videos)
        assert len(str(raised.value)) < 700 and str(raised.value).isprintable()
    with pytest.raises(BadRequest, match="--video-root"):
        path_of("a.mp4", tmp_path)


def test_a_requests_video_is_freed_with_the_request(tmp_path):
    """urllib caches the last URLs that it has split."""
    tracemalloc.start()
    try:
        for number in range(4):
            path_of(f"DATA:video/mp4;base64,{base64.b64encode(bytes([number]) * 2**20).decode()}", tmp_path)
            with pytest.raises(BadRequest, match="has more than 16384 characters"):
                path_of(f"{number}{'a' * 2**20}", tmp_path)
        gc.collect()  # maximum length of errors
        assert tracemalloc.get_traced_memory()[0] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [(1, 65_535), (65_535, 1), (2, 401), (8200, 8200)])
def test_an_image_that_no_model_supports_is_rejected(size, tmp_path):
    Image.new("1", size).save(buffer := io.BytesIO(), "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    with pytest.raises(BadRequest, match=f"{size[0]} x {size[1]} pixels"):
        path_of(url, tmp_path, "image")


INVALID = [
    *(("video", url, "data URL") for url in ("data:,x", "data:video/mp4;base64,a", "data:video/mp4;base64,a?==")),
    ("video", "data:video/mp4;base64,é", "data URL"),
    ("image", "data:image/png;base64,AAAA", "an image cannot be read"),
    ("image", "data:image/svg+xml;base64,PHN2Zy8+", "an image cannot be read"),
    *(("video", url, "is not a URL") for url in ("http://[", "http://[::1", "http://\ud800/", "http://a:b/")),
    *(("video", url, "not a URL|cannot be") for url in ("http://", "http:///a", "https://a b/")),
]


@pytest.mark.parametrize(("kind", "url", "message"), INVALID)
def test_an_invalid_url_or_image_is_a_printable_error(kind, url, message, tmp_path):
    with pytest.raises(BadRequest, match=message) as raised:
        path_of(url, tmp_path, kind, allow_fetch=True)
    assert str(raised.value).isprintable() and str(tmp_path) not in str(raised.value)


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "localhost"),
    *("[::1]", "[::ffff:127.0.0.1]", "[fd00::1]"),
    # Digits and full stops that IDNA maps to ASCII.
    *("１２７.０.０.１", "①②⑦.⓪.⓪.①", "127。0。0。1", "127．0．0．1"),
    # Other notations of 127.0.0.1.
    *("127.1", "0x7f.1", "017700000001", "2130706433"),
    # IPv6 with an embedded IPv4 address: both NAT64 prefixes, 6to4, two older forms, Teredo.
    *("[64:ff9b::7f00:1]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::5db8:d70e]", "[2002:7f00:1::]"),
    *("[::127.0.0.1]", "[::ffff:0:127.0.0.1]", "[2001:0:7f00:1::]"),
]


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_are_never_fetched(host, tmp_path):
    with pytest.raises(BadRequest, match=r"not on the public internet|is not a URL"):
        path_of(f"http://{host}:9/a.mp4", tmp_path, allow_fetch=True)


def test_fetching_needs_the_flag_and_http(tmp_path):
    with pytest.raises(BadRequest, match="--allow-fetch"):
        path_of("https://example.org/a.mp4", tmp_path)
    with pytest.raises(BadRequest, match="scheme 'ftp'"):
        path_of("ftp://example.org/a.mp4", tmp_path, allow_fetch=True)


def test_public_addresses_are_public():
    assert is_public("93.184.215.14") and is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert is_public("64:ff9b::5db8:d70e") and is_public("::ffff:93.184.215.14")  # in the form that IPv6-only hosts use
    assert not is_public("224.0.0.1") and not is_public("100.64.0.1")


def test_this_machines_public_address_is_treated_as_private(monkeypatch):
    assert is_own("127.0.0.1") and not is_own("93.184.215.14")
    monkeypatch.setattr(media_module, "is_own", lambda address: address == "93.184.215.14")
    assert not is_public("93.184.215.14") and not is_public("64:ff9b::5db8:d70e") and is_public("93.184.215.15")


@asynccontextmanager
async def web_server():
    """Serves /video, and the redirects of REDIRECTS."""
    app = web.Application()
    app.router.add_get("/{name}", respond)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


REDIRECTS = {
    "redirect": "/video",
    "private": "http://10.0.0.1/video",
    "wide": "http://１２７.０.０.２/video",
    "bad": "http://[",
    "file": "file:///etc/passwd",
    "loop": "/loop",
}


async def respond(request):
    name = request.match_info["name"]
    if name in REDIRECTS:
        return web.Response(status=302, headers={"Location": REDIRECTS[name]})
    return web.Response(body=b"v" * 5000) if name == "video" else web.Response(status=404)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/video", ""),
        ("/redirect", ""),
        ("/private", "'10.0.0.1' is not on the public internet"),
        ("/wide", "'127.0.0.2' is not on the public internet"),
        ("/bad", "is not a URL"),
        ("/file", "is not an http or https URL"),
        ("/loop", "redirects more than"),
        ("/none", "returned HTTP 404"),
    ],
)
def test_a_fetch_checks_the_address_of_every_redirect(path, message, tmp_path, monkeypatch):
    monkeypatch.setattr(media_module, "is_public", lambda address: address == "127.0.0.1" or is_public(address))

    if message:
        with pytest.raises(BadRequest, match=message):
            fetched(Sources(None, True, tmp_path), path)
    else:
        assert fetched(Sources(None, True, tmp_path), path) == [b"v" * 5000]


def fetched(sources, *paths):
    async def fetch():
        async with web_server() as url, sources.files_of([Medium("video", url + path) for path in paths]) as files:
            return [Path(file).read_bytes() for file in files["video"]]

    return asyncio.run(fetch())


@pytest.fixture
def fetching(monkeypatch):
    monkeypatch.setattr(media_module, "is_public", lambda address: True)
    monkeypatch.setattr(media_module, "MAX_FETCHED_BYTES", 12_000)


def test_the_downloads_of_one_request_are_limited_in_total(tmp_path, fetching):
    sources = Sources(None, True, tmp_path)
    assert fetched(sources, "/video", "/video") == [b"v" * 5000] * 2
    with pytest.raises(BadRequest, match="the files of this request are larger than"):
        fetched(sources, "/video", "/video", "/video")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_not_an_error_of_the_url(tmp_path, fetching, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):  # HTTP 503
        fetched(Sources(None, True, tmp_path), "/video")


@async_test
async def test_the_downloads_of_concurrent_requests_are_limited_in_total(tmp_path, fetching):
    sources = Sources(None, True, tmp_path, DiskBudget(12_000))
    async with web_server() as url:
        media = [Medium("video", f"{url}/video")] * 2
        async with sources.files_of(media):
            with pytest.raises(RequestError, match="other requests are fetching"):
                async with sources.files_of(media[:1]):
                    pass
        async with sources.files_of(media[:1]) as files:
            assert (Path(files["video"][0]).stat().st_size, sources.budget.free_bytes) == (5000, 7000)
    assert sources.budget.free_bytes == 12_000
