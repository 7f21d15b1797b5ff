"""A fake Hugging Face hub on loopback, with the part of the HTTP API that huggingface_hub uses to push and download.

Weights are LFS objects, checked against their sha256 on receipt as the hub's storage does. It speaks no Xet, so the
client must run with HF_HUB_DISABLE_XET. `fail` makes chosen requests go wrong. The routes and the shapes of the answers
follow hf_api.py, _commit_api.py, lfs.py and file_download.py of huggingface_hub 2.4.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

WRITE_TOKEN, READ_TOKEN, FINE_GRAINED_TOKEN = "hf_write", "hf_read", "hf_fine"

# answer with a status; close the connection without an answer; never answer; corrupt the body
Action = int | Literal["close", "hang", "corrupt"]


def account(role: str, **token: Any) -> dict[str, Any]:
    orgs = [{"name": "our-lab", "roleInOrg": "write"}, {"name": "their-lab", "roleInOrg": "read"}]
    return {"type": "user", "name": "ada", "orgs": orgs, "auth": {"accessToken": {"role": role, **token}}}


@dataclass
class Fault:
    """A fault of requests whose `METHOD /path` matches `pattern`, after the first `num_good` of them."""

    pattern: str
    action: Action
    num_good: int = 0


Files = dict[str, bytes]  # contents by path


def is_lfs(path: str) -> bool:
    return path.endswith(".safetensors")


def object_id(path: str, content: bytes) -> str:
    """Returns the hash by which the client compares files: sha256 for LFS objects, git's sha1 for regular files."""
    if is_lfs(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    private: bool
    lfs: dict[str, bytes] = field(default_factory=dict)  # objects of this repository by sha256, committed or not
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, branch: str, files: Files) -> str:
        summary = repr((self.branches.get(branch), sorted(files.items())))
        oid = hashlib.sha1(summary.encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str:
        oid = self.branches.get(revision, revision)
        if oid not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid


class Refusal(Exception):
    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        scope = [{"entity": {"type": "org", "name": "guest-lab"}, "permissions": ["repo.write"]}]
        self.accounts = {
            WRITE_TOKEN: account("write"),
            READ_TOKEN: account("read"),
            FINE_GRAINED_TOKEN: account("fineGrained", fineGrained={"scoped": scope}),
        }
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []  # "METHOD /path", in order of arrival
        self.faults: list[Fault] = []
        self.bugs: list[str] = []  # exceptions of the fake itself
        self.closing = threading.Event()
        self.lock = threading.RLock()

    def environment(self, home: Path) -> dict[str, str]:
        """Returns the environment variables of a program that pushes to this hub."""
        switches = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": WRITE_TOKEN, "HF_HOME": str(home), **switches}

    def fail(self, pattern: str, action: Action, num_good: int = 0) -> None:
        self.faults.append(Fault(pattern, action, num_good))

    def count(self, pattern: str) -> int:
        return sum(1 for request in self.requests if re.match(pattern, request))

    def add_repo(self, repo_id: str, *, private: bool = True, files: Files | None = None) -> None:
        self.repos[repo_id] = Repo(private)
        self.repos[repo_id].commit("main", {".gitattributes": b""} | (files or {}))

    def files(self, repo_id: str, revision: str = "main") -> Files:
        repo = self.repos[repo_id]
        return repo.commits[repo.resolve(revision)]

    def next_fault(self, request: str) -> Action | None:
        for fault in self.faults:
            if re.match(fault.pattern, request):
                if fault.num_good == 0:
                    return fault.action
                fault.num_good -= 1
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that the client or a fault closed; `bugs` has the errors of this fake."""


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        thread.join()
        hub.server_close()
    assert not hub.bugs, hub.bugs


@contextmanager
def fresh_client(patch: pytest.MonkeyPatch, home: Path) -> Iterator[FakeHub]:
    """Yields a hub with a client that has no login and connects only to loopback."""
    resolve = socket.getaddrinfo

    def resolve_loopback(host: str, *args: Any, **kwargs: Any) -> Any:
        assert host == "127.0.0.1", f"a test connects to {host}"
        return resolve(host, *args, **kwargs)

    patch.setattr(socket, "getaddrinfo", resolve_loopback)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        patch.delenv(name, raising=False)
    settings = {"HF_TOKEN_PATH": str(home / "token"), "HF_STORED_TOKENS_PATH": str(home / "stored_tokens")}
    switches = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_TELEMETRY": True}
    for name, value in (settings | switches).items():  # the client read its environment at import
        patch.setattr(constants, name, value)
    with serve_hub() as hub:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        yield hub
    huggingface_hub.close_session()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # sends headers and body in one packet; with two packets each answer waits 40 ms for an ACK

    @property
    def hub(self) -> FakeHub:
        return cast(FakeHub, self.server)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.path = urlsplit(self.path).path
        request = f"{self.command} {unquote(self.path)}"
        with self.hub.lock:
            self.hub.requests.append(request)
            fault = self.hub.next_fault(request)
        if fault == "hang":
            self.hub.closing.wait(30)
        if fault in ("hang", "close"):
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        try:
            if isinstance(fault, int):
                raise Refusal(fault, "the fake hub was told to fail")
            with self.hub.lock:
                self.route(body)
        except Refusal as refusal:
            code = {"X-Error-Code": refusal.code} if refusal.code else {}
            self.reply({"error": refusal.message}, refusal.status, {"X-Error-Message": refusal.message, **code})
        except Exception as bug:
            self.hub.bugs.append(f"{request}: {bug!r}")
            raise

    do_HEAD = do_POST = do_PUT = do_GET

    def route(self, body: bytes) -> None:
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, self.path)
            if match and self.command in method.split():
                return getattr(self, answer)(body, **{name: unquote(text) for name, text in match.groupdict().items()})
        raise Refusal(404, f"the fake hub has no {self.command} {self.path}")

    def reply(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(payload)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def user(self) -> dict[str, Any]:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.hub.accounts:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.accounts[token]

    def may_write(self, repo_id: str) -> bool:
        user = self.user()
        scopes = user["auth"]["accessToken"].get("fineGrained", {}).get("scoped", [])
        owners = {user["name"], *(org["name"] for org in user["orgs"] if org["roleInOrg"] != "read")}
        owners |= {scope["entity"]["name"] for scope in scopes}
        return repo_id.split("/")[0] in owners and user["auth"]["accessToken"]["role"] != "read"

    def repo(self, repo_id: str, *, write: bool = False) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not self.may_write(repo_id)):
            raise Refusal(404, "Repository not found", "RepoNotFound")
        if write and not self.may_write(repo_id):
            raise Refusal(403, "You don't have the rights to write to this repository")
        return repo

    def whoami(self, body: bytes) -> None:
        self.reply(self.user())

    def auth_check(self, body: bytes, repo_id: str) -> None:
        self.repo(repo_id, write=True)
        self.reply({})

    def create_repo(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or self.user()['name']}/{asked['name']}"
        if not self.may_write(repo_id):
            raise Refusal(403, f"You don't have the rights to create a model under the namespace {repo_id}")
        if repo_id in self.hub.repos:
            return self.reply({"error": "You already created this model repo", "url": self.repo_url(repo_id)}, 409)
        self.hub.add_repo(repo_id, private=asked.get("visibility") == "private")
        self.reply({"url": self.repo_url(repo_id), "name": repo_id})

    def create_branch(self, body: bytes, repo_id: str, branch: str) -> None:
        repo = self.repo(repo_id, write=True)
        if branch in repo.branches:
            raise Refusal(409, f"Reference {branch} already exists")
        repo.branches[branch] = repo.branches["main"]
        self.reply({})

    def repo_info(self, body: bytes, repo_id: str, revision: str = "main") -> None:
        repo = self.repo(repo_id)
        oid = repo.resolve(revision)
        siblings = [{"rfilename": path} for path in sorted(repo.commits[oid])]
        self.reply({"id": repo_id, "sha": oid, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, body: bytes, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id)
        files = repo.commits[repo.resolve(revision)]
        entries = []
        for path, content in sorted(files.items()):
            entry = {"type": "file", "path": path, "size": len(content), "oid": object_id(path, content)}
            lfs = {"lfs": {"oid": entry["oid"], "size": len(content), "pointerSize": 134}}
            entries.append(entry | (lfs if is_lfs(path) else {}))
        self.reply(entries)

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> None:
        repo = self.repo(repo_id)
        oid = repo.resolve(revision)
        if path not in repo.commits[oid]:
            raise Refusal(404, f"{path} is not in {revision}", "EntryNotFound")
        content = repo.commits[oid][path]
        self.reply(content, headers={"X-Repo-Commit": oid, "ETag": f'"{object_id(path, content)}"'})

    def validate_yaml(self, body: bytes) -> None:
        self.reply({"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id, write=True)
        files = repo.commits[repo.resolve(revision)]
        ignored = files.get(".gitignore", b"").decode().split()
        answers = []
        for path in (asked["path"] for asked in json.loads(body)["files"]):
            answer = {"path": path, "uploadMode": "lfs" if is_lfs(path) else "regular"}
            answer["shouldIgnore"] = any(fnmatch(path, pattern) for pattern in ignored)
            answers.append(answer | ({"oid": object_id(path, files[path])} if path in files else {}))
        self.reply({"files": answers})

    def lfs_batch(self, body: bytes, repo_id: str) -> None:
        repo = self.repo(repo_id, write=True)
        objects = json.loads(body)["objects"]
        for missing in (item for item in objects if item["oid"] not in repo.lfs):
            upload = {"href": f"{self.hub.url}/lfs/object/{repo_id}/{missing['oid']}"}
            missing["actions"] = {"upload": upload}
        self.reply({"transfer": "basic", "objects": objects})

    def put_object(self, body: bytes, repo_id: str, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "BadDigest: the sha256 of what arrived is not the one announced")
        self.hub.repos[repo_id].lfs[oid] = body
        self.reply({})

    def commit(self, body: bytes, repo_id: str, revision: str) -> None:
        repo = self.repo(repo_id, write=True)
        files = dict(repo.commits[repo.resolve(revision)])
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                if value["oid"] not in repo.lfs:
                    raise Refusal(400, f"LFS object {value['oid']} of {value['path']} does not exist")
                files[value["path"]] = repo.lfs[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        oid = repo.commit(revision, files)
        self.reply({"success": True, "commitOid": oid, "commitUrl": f"{self.repo_url(repo_id)}/commit/{oid}"})

    def repo_url(self, repo_id: str) -> str:
        return f"{self.hub.url}/{repo_id}"


REPO = r"(?P<repo_id>[^/]+/[^/]+)"
KIND = "(?:models|datasets)"  # repositories of all types share one namespace here
OID = r"(?P<oid>[0-9a-f]{64})"
ROUTES = [
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/repos/create", "create_repo"),
    ("POST", "/api/validate-yaml", "validate_yaml"),
    ("GET", f"/api/{KIND}/{REPO}", "repo_info"),
    ("GET", f"/api/{KIND}/{REPO}/revision/(?P<revision>[^/]+)", "repo_info"),
    ("GET", f"/api/models/{REPO}/auth-check/write", "auth_check"),
    ("GET", f"/api/{KIND}/{REPO}/tree/(?P<revision>[^/]+)", "tree"),
    ("POST", f"/api/models/{REPO}/branch/(?P<branch>[^/]+)", "create_branch"),
    ("POST", f"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", f"/api/models/{REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", f"/lfs/object/{REPO}/{OID}", "put_object"),
    ("GET HEAD", f"(?:/datasets)?/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]
