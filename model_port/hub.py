"""Uploads a Hugging Face directory to the hub: only a model's files, and private by default.

The client's `upload_folder` sends the files and commits them together (250 files per commit). Files that a failed
upload has sent stay on the hub, which finds them by content, so running the command again only sends the rest. The
client uses Xet if hf_xet is installed, and otherwise LFS. A private hub without Xet needs HF_HUB_DISABLE_XET=1.
"""

import fnmatch
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, constants, get_token, set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (
    HFValidationError,
    _http,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)

from model_port.card import CURVE_FILE, renamed
from model_port.config import read_config
from model_port.hf_files import CARD_FILE, SIDE_FILES
from model_port.layout import is_adapter
from model_port.progress import Meter
from model_port.safetensors_io import INDEX_FILE, SINGLE_FILE

ANSWER_DEADLINE_S = 120.0  # per request to the hub; the client tries up to six times, and hf_xet has its own limits
WEIGHT_FILES = (SINGLE_FILE, INDEX_FILE, "model-[0-9]*-of-[0-9]*.safetensors")
MODEL_FILES = (*WEIGHT_FILES, *SIDE_FILES, CARD_FILE, CURVE_FILE)  # the only files that are ever uploaded


def push_to_hub(
    directory: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Uploads a model to `repo_id` and returns the commit's URL. Creates the repository and the branch if needed.

    Only `MODEL_FILES` are sent, and the card has `repo_id` in place of the directory's name. Weight files of an earlier
    model are deleted, because a loader that globs would mix both models; other files in the repository stay. A new
    repository is private unless `public` is set; the visibility of an existing repository must match `public`.
    """
    directory = Path(directory).absolute()
    names = model_files(directory)
    with _deadline(), transferring(f"pushing to {repo_id}"), TemporaryDirectory() as folder:
        for name in names:
            if name == CARD_FILE:
                card = renamed((directory / name).read_bytes(), directory.name, repo_id)
                (Path(folder) / name).write_bytes(card)
            else:
                (Path(folder) / name).symlink_to(directory / name)
        api = _connect(repo_id)
        _check_write_access(api, repo_id, public)
        try:
            api.create_repo(repo_id, private=not public, exist_ok=True)
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                delete_patterns=list(WEIGHT_FILES),
                commit_message=commit_message,
                revision=revision,
            )
            absent = sorted({*names} - {*api.list_repo_files(repo_id, revision=commit.oid)})
        except Exception as problem:  # hf_xet raises types that it does not document
            raise RuntimeError(
                f"the push to {repo_id} stopped: {reason_of(problem)}; run the same command again to send the missing "
                f"files"
            ) from problem
    if absent:
        raise RuntimeError(
            f"{commit.commit_url} does not have {', '.join(absent[:5])}: the .gitignore in {repo_id} excludes "
            f"{len(absent)} of {len(names)} files; remove it there and run the same command again"
        )
    return commit.commit_url


def check_hub_access(repo_id: str, *, public: bool = False) -> None:
    """Raises if a push to `repo_id` would fail. Call it before a long conversion.

    A malformed id, offline mode and a missing token are detected without a request.
    """
    with _deadline():
        api = _connect(repo_id)
        _check_write_access(api, repo_id, public)


def model_files(directory: Path) -> list[str]:
    """Returns the names of the files to send. Raises if the model is incomplete, an adapter, or not its config's."""
    from model_port.weights import check_hf_tensors, open_hf_tensors  # late, because it imports jax

    if is_adapter(directory):
        raise ValueError(
            f"{directory} is an adapter, not a complete model: merge it with `python -m model_port.export`; "
            f"or export it with --adapter and upload that directory with `hf upload OWNER/NAME DIR --private`"
        )
    try:
        config = read_config(directory)
        with open_hf_tensors(directory, config) as tensors:
            check_hf_tensors(config, tensors)
    except ValueError as problem:
        raise ValueError(
            f"the model to push cannot be loaded; write it with `python -m model_port.export`: {problem}"
        ) from problem
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in MODEL_FILES)]


def _connect(repo_id: str) -> HfApi:
    """Returns a client for `repo_id`, after all checks that need no request."""
    check_repo_id(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise RuntimeError(
            f"cannot push to {repo_id}: HF_HUB_OFFLINE=1 (or TRANSFORMERS_OFFLINE=1); unset it, or do not push"
        )
    api = HfApi()
    try:
        api.token = get_token() or ""
    except Exception as problem:  # a login that must be renewed may fail in many ways
        raise RuntimeError(f"no Hugging Face token: {reason_of(problem)}; run `hf auth login`") from problem
    if not api.token:
        raise RuntimeError(f"no Hugging Face token to push to {repo_id}: {_new_token(api)}")
    if not re.fullmatch("[!-~]+", api.token):  # the HTTP library's own error message would print the token
        raise ValueError(f"the Hugging Face token has a space or another invalid character: {_new_token(api)}")
    return api


def check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as problem:
        raise ValueError(f"repo id {repo_id!r} is malformed: {problem}") from problem
    if "/" not in repo_id:
        raise ValueError(f"repo id {repo_id!r} has no owner: write OWNER/NAME, for example your-name/{repo_id}")


def _check_write_access(api: HfApi, repo_id: str, public: bool) -> None:
    try:
        account = api.whoami()
    except Exception as problem:
        if _status(problem) == 401:
            raise RuntimeError(f"{api.endpoint} refuses the token (401): {_new_token(api)}") from problem
        raise RuntimeError(_unreachable(api, problem)) from problem
    access: dict[str, Any] = account.get("auth", {}).get("accessToken", {})
    if access.get("role") == "read":
        raise RuntimeError(f"the token of {account['name']} is read-only: {_new_token(api)}")
    try:
        api.auth_check(repo_id, write=True)
        private = bool(api.model_info(repo_id).private)
    except Exception as problem:
        if _status(problem) in (401, 404) and repo_id.split("/")[0].lower() in _writable_owners(account):
            return  # the repository does not exist yet
        if _status(problem) in (401, 403, 404):
            raise RuntimeError(
                f"{account['name']} may not write to {repo_id} ({_status(problem)}): choose a repository of your own, "
                f"like {account['name']}/{repo_id.split('/')[1]}, or use a token that its owner has given access"
            ) from problem
        raise RuntimeError(_unreachable(api, problem)) from problem
    if private is public:
        now, flag, then = ("private", "without", "public") if private else ("public", "with", "private")
        raise ValueError(
            f"{repo_id} exists and is {now}: push there {flag} --public, make it {then} at "
            f"{api.endpoint}/{repo_id}/settings, or choose another name"
        )


def _new_token(api: HfApi) -> str:
    return f"make one with write access at {api.endpoint}/settings/tokens, then set HF_TOKEN or run `hf auth login`"


def _writable_owners(account: dict[str, Any]) -> set[str]:
    """Returns the owners that the token may create repositories for.

    They are the user, the user's organizations, and the owners that a fine-grained token lists.
    """
    fine_grained: dict[str, Any] = account.get("auth", {}).get("accessToken", {}).get("fineGrained") or {}
    owners = [account, *(org for org in account.get("orgs", []) if org.get("roleInOrg") != "read")]
    owners += [scope["entity"] for scope in fine_grained.get("scoped", []) if "entity" in scope]
    return {owner["name"].lower() for owner in owners if "name" in owner}


@contextmanager
def _deadline() -> Iterator[None]:
    """Sets a timeout for each request, because the client has none by default and disables it in some calls."""
    make_client = _http._GLOBAL_CLIENT_FACTORY

    def impose(request: Any) -> None:
        waits: dict[str, float | None] = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            phase: ANSWER_DEADLINE_S if waits.get(phase) is None else waits[phase]
            for phase in ("connect", "read", "write", "pool")
        }

    def make_client_with_deadline() -> Any:
        client = make_client()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "request": [*hooks["request"], impose]}
        return client

    set_client_factory(make_client_with_deadline)
    try:
        yield
    finally:
        set_client_factory(make_client)


@contextmanager
def transferring(task: str) -> Iterator[Meter]:
    """Shows the client's progress bars on a terminal, or if the environment enables them; otherwise log lines."""
    asked_for = constants.HF_HUB_DISABLE_PROGRESS_BARS is False
    with Meter(task) as meter:
        if sys.stderr.isatty() or asked_for or are_progress_bars_disabled():
            yield meter
            return
        disable_progress_bars()
        try:
            yield meter
        finally:
            enable_progress_bars()


def _unreachable(api: HfApi, problem: Exception) -> str:
    return f"{api.endpoint} does not answer as a hub ({reason_of(problem)}): check the network and HF_ENDPOINT"


def _status(problem: Exception) -> int | None:
    return problem.response.status_code if isinstance(problem, HfHubHTTPError) else None


def reason_of(problem: BaseException) -> str:
    """Returns an error's reason on one line, without URL queries, because their signatures are credentials."""
    if type(problem) is RuntimeError and problem.__cause__ is not None:  # the client's "Error while uploading"
        problem = problem.__cause__
    if isinstance(problem, HfHubHTTPError):
        text = f"HTTP {problem.response.status_code}, {problem.server_message or problem.response.reason_phrase}"
    else:
        text = f"{type(problem).__name__}, {problem}" if str(problem) else type(problem).__name__
    return re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", " ".join(text.split()))[:300]
