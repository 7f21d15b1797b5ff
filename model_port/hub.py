"""Uploads a Hugging Face directory to the hub.

The large files go up one by one and a single commit then names all of them, so the repository never shows half a model.
What a failed run has uploaded stays on the hub, found by its content: running again sends only the rest. (The client's
own `upload_folder` hands every file to one transfer that either completes or fails, and cannot say how far it came.)
How the bytes travel is the client's choice: Xet where hf_xet is installed, otherwise LFS. It does not ask the hub, so a
private hub without Xet needs HF_HUB_DISABLE_XET=1.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    RepoFile,
    constants,
    get_token,
    set_client_factory,
)
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (
    HFValidationError,
    _http,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)
from tqdm import tqdm

from model_port.card import CURVE_FILE
from model_port.hf_files import CARD_FILE, SIDE_FILES
from model_port.progress import Meter
from model_port.safetensors_io import INDEX_FILE, SINGLE_FILE, HfTensors

ANSWER_DEADLINE_S = 120.0  # far above any healthy answer, so that only a hung hub meets it
WEIGHT_FILE = re.compile(rf"{re.escape(SINGLE_FILE)}|{re.escape(INDEX_FILE)}|model-\d+-of-\d+\.safetensors")


def push_to_hub(
    directory: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    revision: str | None = None,
    commit_message: str = "Upload model",
    token: str | None = None,
    endpoint: str | None = None,
    answer_deadline_s: float = ANSWER_DEADLINE_S,
) -> str:
    """Makes `directory` the model in `repo_id` and returns the commit's URL; creates repository and branch as needed.

    Weight files of an earlier model that `directory` lacks are deleted, since a loader that globs would mix the two;
    other files in the repository stay. Only weights, side files and the card are sent, whatever else lies there. Unless
    `public` is said, a repository is made private, and one that is public is refused.
    `answer_deadline_s` bounds the wait for any one answer; the client asks up to six times while uploading. hf_xet has
    limits of its own (HF_XET_CLIENT_READ_TIMEOUT and its siblings), fit for slow links: minutes, not seconds.
    """
    additions = _additions(Path(directory))
    num_uploaded, stage = 0, "creating the repository"
    with _deadline(answer_deadline_s), transferring(f"pushing to {repo_id}") as meter:
        api = _connect(repo_id, token, endpoint)
        _check_write_access(api, repo_id, public)
        try:
            api.create_repo(repo_id, private=not public, exist_ok=True)
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            for addition in additions:
                stage = f"uploading {addition.path_in_repo}"
                meter.what = f"{stage}, file {num_uploaded + 1} of {len(additions)}"
                api.preupload_lfs_files(repo_id, [addition], revision=revision, free_memory=False)
                num_uploaded += 1
            meter.what = stage = "committing"
            stale = _stale_weights(api, repo_id, revision, {addition.path_in_repo for addition in additions})
            operations = [*additions, *map(CommitOperationDelete, stale)]
            commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
            stage = "checking the commit"
            arrived_bytes = _file_bytes(api, repo_id, commit.oid)
        except Exception as problem:  # hf_xet raises types that it does not document
            raise RuntimeError(_stopped(repo_id, stage, problem, additions, num_uploaded)) from problem
    absent = [op.path_in_repo for op in additions if arrived_bytes.get(op.path_in_repo) != op.upload_info.size]
    if absent:
        raise RuntimeError(
            f"{commit.commit_url} lacks {', '.join(absent[:5])}: the .gitignore in {repo_id} excludes "
            f"{len(absent)} of {len(additions)} files; remove it there and run the same command again"
        )
    return commit.commit_url


def check_hub_access(
    repo_id: str,
    token: str | None = None,
    *,
    public: bool = False,
    endpoint: str | None = None,
    answer_deadline_s: float = ANSWER_DEADLINE_S,
) -> None:
    """Raises what would keep a push to `repo_id` from succeeding; call it before hours of conversion.

    A malformed id, offline mode and a missing token are found without a request.
    """
    with _deadline(answer_deadline_s):
        api = _connect(repo_id, token, endpoint)
        _check_write_access(api, repo_id, public)


def _additions(directory: Path) -> list[CommitOperationAdd]:
    """Every file of a complete model, the largest first so that a failure shows how much of the transfer is done."""
    try:
        if not (directory / constants.CONFIG_NAME).is_file():
            raise ValueError(f"{directory} has no {constants.CONFIG_NAME}")
        HfTensors(directory).close()
    except ValueError as problem:
        raise ValueError(f"the model to push is incomplete, export it again: {problem}") from problem
    ours = (*SIDE_FILES, CARD_FILE, CURVE_FILE)
    sent = [path for path in sorted(directory.iterdir()) if path.name in ours or WEIGHT_FILE.fullmatch(path.name)]
    additions = [CommitOperationAdd(path.name, path) for path in sent]
    return sorted(additions, key=lambda addition: -addition.upload_info.size)


def _connect(repo_id: str, token: str | None, endpoint: str | None) -> HfApi:
    """The client for `repo_id`, after every check that needs no request."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as problem:
        raise ValueError(f"repo id {repo_id!r} is malformed: {problem}") from problem
    if "/" not in repo_id:
        raise ValueError(f"repo id {repo_id!r} lacks an owner: write OWNER/NAME, for example your-name/{repo_id}")
    if constants.HF_HUB_OFFLINE:
        raise RuntimeError(
            f"cannot push to {repo_id}: HF_HUB_OFFLINE=1 (or TRANSFORMERS_OFFLINE=1); unset it, or do not push"
        )
    api = HfApi(endpoint)
    try:
        api.token = (token or get_token() or "").strip()
    except Exception as problem:  # a login that must be renewed may fail in many ways
        raise RuntimeError(f"no Hugging Face token: {_reason(problem)}; run `hf auth login`") from problem
    if not api.token:
        raise RuntimeError(f"no Hugging Face token to push to {repo_id}: {_new_token(api)}")
    if not re.fullmatch("[!-~]+", api.token):  # the HTTP library's own complaint would print it
        raise ValueError(f"the Hugging Face token holds a space or a letter that no token has: {_new_token(api)}")
    return api


def _check_write_access(api: HfApi, repo_id: str, public: bool) -> None:
    try:
        account = api.whoami()
    except Exception as problem:
        if _status(problem) == 401:
            raise RuntimeError(f"{api.endpoint} refuses the token (401): {_new_token(api)}") from problem
        raise RuntimeError(_unreachable(api, problem)) from problem
    access: dict[str, Any] = account.get("auth", {}).get("accessToken", {})
    if access.get("role") == "read":
        raise RuntimeError(f"the token of {account['name']} may only read: {_new_token(api)}")
    try:
        api.auth_check(repo_id, write=True)
        is_seen = not public and not api.model_info(repo_id).private
    except Exception as problem:
        if _status(problem) in (401, 404) and repo_id.split("/")[0].lower() in _writable_owners(account):
            return  # the repository does not exist yet
        if _status(problem) in (401, 403, 404):
            raise RuntimeError(
                f"{account['name']} may not write to {repo_id} ({_status(problem)}): choose a repository of your own, "
                f"like {account['name']}/{repo_id.split('/')[1]}, or use a token that its owner has given access"
            ) from problem
        raise RuntimeError(_unreachable(api, problem)) from problem
    if is_seen:
        raise ValueError(
            f"{repo_id} exists and is public: push there with --public, make it private at "
            f"{api.endpoint}/{repo_id}/settings, or choose another name"
        )


def _new_token(api: HfApi) -> str:
    return f"make one with write access at {api.endpoint}/settings/tokens, then set HF_TOKEN or run `hf auth login`"


def _writable_owners(account: dict[str, Any]) -> set[str]:
    """Under whose names the token may create: the user's, the organizations', and those a fine-grained token lists."""
    fine_grained: dict[str, Any] = account.get("auth", {}).get("accessToken", {}).get("fineGrained") or {}
    owners = [account, *(org for org in account.get("orgs", []) if org.get("roleInOrg") != "read")]
    owners += [scope["entity"] for scope in fine_grained.get("scoped", []) if "entity" in scope]
    return {owner["name"].lower() for owner in owners if "name" in owner}


def _stale_weights(api: HfApi, repo_id: str, revision: str | None, kept: set[str]) -> list[str]:
    return [name for name in _file_bytes(api, repo_id, revision) if WEIGHT_FILE.fullmatch(name) and name not in kept]


def _file_bytes(api: HfApi, repo_id: str, revision: str | None) -> dict[str, int]:
    entries = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}


@contextmanager
def _deadline(answer_deadline_s: float) -> Iterator[None]:
    """Bounds the wait for each answer. The client's default is forever, and some calls ask for that explicitly."""
    make_client = _http._GLOBAL_CLIENT_FACTORY

    def impose(request: Any) -> None:
        waits: dict[str, float | None] = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            phase: answer_deadline_s if waits.get(phase) is None else waits[phase]
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
def transferring(what: str) -> Iterator[Meter]:
    """The client's bars on a terminal, or where the environment asks for them; elsewhere a line now and then."""
    asked_for = constants.HF_HUB_DISABLE_PROGRESS_BARS is False
    with Meter(what) as meter:
        if sys.stderr.isatty() or asked_for or are_progress_bars_disabled():
            yield meter
            return
        disable_progress_bars()
        try:
            yield meter
        finally:
            enable_progress_bars()


def _stopped(
    repo_id: str, stage: str, problem: Exception, additions: list[CommitOperationAdd], num_uploaded: int
) -> str:
    num_bytes = [addition.upload_info.size for addition in additions]
    done, total = (tqdm.format_sizeof(n, "B") for n in (sum(num_bytes[:num_uploaded]), sum(num_bytes)))
    return (
        f"the push to {repo_id} stopped while {stage}: {_reason(problem)}. {num_uploaded} of {len(additions)} files "
        f"({done} of {total}) are uploaded; run the same command again and it continues from there"
    )


def _unreachable(api: HfApi, problem: Exception) -> str:
    return f"{api.endpoint} does not answer as a hub should ({_reason(problem)}): check the network and HF_ENDPOINT"


def _status(problem: Exception) -> int | None:
    return problem.response.status_code if isinstance(problem, HfHubHTTPError) else None


def _reason(problem: BaseException) -> str:
    """One line. Queries are cut from URLs, since their signatures are credentials."""
    if type(problem) is RuntimeError and problem.__cause__ is not None:  # the client's "Error while uploading"
        problem = problem.__cause__
    if isinstance(problem, HfHubHTTPError):
        text = f"HTTP {problem.response.status_code}, {problem.server_message or problem.response.reason_phrase}"
    else:
        text = f"{type(problem).__name__}, {problem}" if str(problem) else type(problem).__name__
    return re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", " ".join(text.split()))[:300]
