"""Pushing to a fake hub on loopback. No test can reach any other host."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from fake_hub import FINE_GRAINED_TOKEN, READ_TOKEN, WRITE_TOKEN, FakeHub, fresh_client
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from model_port import hub as module, push
from model_port.hub import check_hub_access, push_to_hub

# the client uses a deprecated argument of its HTTP library
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "ada/tiny-vl"
PUT = r"PUT /lfs/"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def waits_s(monkeypatch) -> list[float]:
    """Skips the client's pauses between attempts, and records them."""
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=waits.append))
    return waits


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[FakeHub]:
    """A hub whose client has a write token."""
    with fresh_client(monkeypatch, tmp_path / "home") as served:
        monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
        yield served


@pytest.fixture
def model(tmp_path, tiny_hf) -> Path:
    """An export with three shards of unequal size and small files."""
    return write_model(tmp_path / "model", tiny_hf, SHARDS)


def write_model(directory: Path, source: Path, shards: Sequence[str]) -> Path:
    directory.mkdir()
    tensors, weight_map = load_file(source / "model.safetensors"), {}
    for shard, names in zip(shards, np.array_split(sorted(tensors), len(shards)), strict=True):
        save_file({name: tensors[name] for name in names.tolist()}, directory / shard)
        weight_map |= dict.fromkeys(names.tolist(), shard)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Größe\n")
    (directory / "merges.txt").write_text("")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def message(error, call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    assert WRITE_TOKEN not in text and READ_TOKEN not in text
    return text


def test_a_download_after_a_push_has_the_same_bytes_from_one_commit(tmp_path, hub, model):
    url = push_to_hub(model, REPO, commit_message="Step 40")
    assert url.startswith(f"{hub.url}/{REPO}/commit/")
    got, revision = tmp_path / "got", url.rsplit("/", 1)[1]
    huggingface_hub.snapshot_download(REPO, revision=revision, local_dir=got)
    assert contents(got) == {**contents(model), ".gitattributes": b""}
    assert len(hub.repos[REPO].lfs) == len(SHARDS)
    assert hub.count("POST .*/commit/") == 1
    assert len(hub.repos[REPO].commits) == 2  # the first created the repository


def test_a_push_removes_earlier_weights_and_keeps_other_files(hub, model, tmp_path, tiny_hf):
    (model / "README.md").write_text("# model\n\nAn edited card of a model\n")
    push_to_hub(model, REPO)
    assert hub.files(REPO)["README.md"] == f"# {REPO}\n\nAn edited card of a model\n".encode()
    write_model(tmp_path / "smaller", tiny_hf, ["model-00001-of-00001.safetensors"])
    (tmp_path / "smaller" / "README.md").unlink()
    push_to_hub(tmp_path / "smaller", REPO)
    assert set(hub.files(REPO)) == {*contents(tmp_path / "smaller"), "README.md", ".gitattributes"}


def test_a_revision_is_pushed_to_its_own_branch(hub, model):
    push_to_hub(model, REPO, revision="step/40")
    assert set(SHARDS) <= set(hub.files(REPO, "step/40"))
    assert set(hub.files(REPO)) == {".gitattributes"}
    push_to_hub(model, REPO, revision="step/40")  # the branch exists at the second push


@pytest.mark.parametrize("public", [False, True])
def test_a_repository_is_private_by_default(hub, model, public):
    push_to_hub(model, REPO, public=public)
    assert hub.repos[REPO].private is not public
    push_to_hub(model, REPO, public=public)


@pytest.mark.parametrize(
    ("public", "refusal"),
    [
        (False, "is public: push there with --public, make it private"),
        (True, "is private: push there without --public"),
    ],
)
def test_a_push_to_a_repository_of_other_visibility_is_rejected(hub, model, public, refusal):
    hub.add_repo(REPO, private=public)
    assert refusal in message(ValueError, lambda: push_to_hub(model, REPO, public=public))
    assert set(hub.files(REPO)) == {".gitattributes"} and hub.count(PUT) == 0


def test_unrelated_files_are_not_pushed(hub, model):
    for name in ("hf_token.txt", "credentials.json", ".secrets.json", "notes.md", "optimizer.safetensors"):
        (model / name).write_text("secret")
    (model / "private").mkdir()
    (model / "private" / "config.json").write_text("{}")
    push_to_hub(model, REPO)
    sent = hub.files(REPO)
    assert "config.json" in sent and not any("/" in name for name in sent)
    assert b"secret" not in sent.values()


def test_a_dry_run_lists_exactly_the_files_of_a_push_and_sends_nothing(hub, model, monkeypatch, capsys):
    (model / "notes.md").write_text("secret")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("sys.argv", ["push", str(model), REPO, "--public", "--revision", "v2", "--dry-run"])
    push.main()
    head, *lines, total, ending = capsys.readouterr().out.splitlines()
    assert head == f"{REPO}, public, branch v2, as one commit 'Upload model':" and ending == "dry run: nothing was sent"
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    push_to_hub(model, REPO)
    sent = {name: content for name, content in hub.files(REPO).items() if name != ".gitattributes"}
    assert [line.split()[0] for line in lines] == sorted(sent)
    first = f"{len(sent[SHARDS[0]]) / 1e6:.1f} MB"
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("model-00001")] == [first]
    assert total.split(maxsplit=2) == [str(len(sent)), "files", f"{sum(map(len, sent.values())) / 1e6:.1f} MB"]


@pytest.mark.parametrize(("name", "repo"), [("config.json", REPO), ("", "tiny-vl")])
def test_a_dry_run_makes_the_same_checks_without_a_request(hub, model, monkeypatch, name, repo):
    (model / name).unlink() if name else None
    monkeypatch.setattr("sys.argv", ["push", str(model), repo, "--dry-run"])
    assert (name or "has no owner") in message(ValueError, push.main)
    assert hub.requests == []


@pytest.mark.parametrize("branch", ["", "my branch", "a//b", "a~1"])
def test_a_revision_that_is_no_branch_is_rejected(branch, hub, model, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["push", str(model), REPO, "--revision", branch])
    with pytest.raises(SystemExit):
        push.main()
    assert f"{branch!r} is not the name of a branch" in capsys.readouterr().err and hub.requests == []


def test_gitignored_files_are_an_error(hub, model):
    hub.add_repo(REPO, files={".gitignore": b"*.safetensors"})
    text = message(RuntimeError, lambda: push_to_hub(model, REPO))
    assert ".gitignore" in text and SHARDS[0] in text


@pytest.mark.parametrize("action", [500, 403, "close", "corrupt"])
def test_a_push_after_a_failure_sends_only_the_missing_files(hub, model, waits_s, action):
    hub.fail(PUT, action, num_good=1)
    text = message(RuntimeError, lambda: push_to_hub(model, REPO))
    assert REPO in text and "run the same command again" in text
    assert set(hub.files(REPO)) == {".gitattributes"} and len(hub.repos[REPO].lfs) == 1
    assert bool(waits_s) == (action in (500, "close"))  # a retry does not help the others

    hub.faults.clear()
    hub.requests.clear()
    push_to_hub(model, REPO)
    assert hub.count(PUT) == 2
    assert hub.files(REPO) == {**contents(model), ".gitattributes": b""}


@pytest.mark.parametrize("request_", [r"POST /api/repos/create", PUT, r"POST .*/commit/"])
def test_a_push_to_a_hanging_hub_ends_at_its_deadline(hub, model, waits_s, monkeypatch, request_):
    monkeypatch.setattr(module, "ANSWER_DEADLINE_S", 0.5)  # all other requests hang
    hub.fail(request_, "hang")
    assert "Timeout" in message(RuntimeError, lambda: push_to_hub(model, REPO))


def test_the_clients_timeout_is_restored_after_a_push(hub, model):
    push_to_hub(model, REPO)
    hub.fail("GET /api/models/", "close")
    message(RuntimeError, lambda: check_hub_access(REPO))
    assert huggingface_hub.get_session().timeout.read is None
    assert len(huggingface_hub.get_session().event_hooks["request"]) == 1


def refusals(hub, model, error, repo_id=REPO):
    """Returns the errors of the check and of the push itself; both must make all checks."""
    check = message(error, lambda: check_hub_access(repo_id))
    assert message(error, lambda: push_to_hub(model, repo_id)) == check
    assert hub.count("POST|PUT") == 0
    return check


@pytest.mark.parametrize("repo_id", ["", "a/b/c", "ada/.x", "ada/a--b", "ada/x.git", "ada/a b", "datasets/ada/x", "vl"])
def test_malformed_repo_id_is_named_before_any_request(hub, model, repo_id):
    assert repr(repo_id) in refusals(hub, model, ValueError, repo_id)
    assert hub.requests == []


def test_an_invalid_token_is_rejected_and_not_printed(hub, model, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"{WRITE_TOKEN} oops")
    text = refusals(hub, model, ValueError)
    assert "oops" not in text and "/settings/tokens" in text and hub.requests == []


def test_the_token_of_a_login_is_used(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    Path(constants.HF_TOKEN_PATH).parent.mkdir()
    Path(constants.HF_TOKEN_PATH).write_text(f"{WRITE_TOKEN}\n")
    check_hub_access(REPO)
    assert hub.count("GET /api/whoami-v2") == 1


def test_a_missing_token_and_offline_mode_fail_before_any_request(hub, model, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    text = refusals(hub, model, RuntimeError)
    assert "HF_TOKEN" in text and "hf auth login" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refusals(hub, model, RuntimeError)
    assert "HF_HUB_OFFLINE=1" in text and "unset it" in text
    assert hub.requests == []


@pytest.mark.parametrize(("token", "complaint"), [("hf_revoked", "401"), (READ_TOKEN, "is read-only")])
def test_a_read_only_token_is_rejected(hub, model, monkeypatch, token, complaint):
    monkeypatch.setenv("HF_TOKEN", token)
    text = refusals(hub, model, RuntimeError)
    assert complaint in text and "/settings/tokens" in text and token not in text


@pytest.mark.parametrize("repo_id", ["eve/hers", "eve/new", "their-lab/new"])
def test_a_repository_without_write_access_is_rejected(hub, model, repo_id):
    hub.add_repo("eve/hers")
    text = refusals(hub, model, RuntimeError, repo_id)
    assert repo_id in text and "ada/" in text


@pytest.mark.parametrize("repo_id", [REPO, "Ada/new", "our-lab/new", "guest-lab/new"])
def test_the_check_passes_for_writable_repositories_and_changes_nothing(hub, monkeypatch, repo_id):
    hub.add_repo(REPO)
    monkeypatch.setenv("HF_TOKEN", FINE_GRAINED_TOKEN if "guest" in repo_id else WRITE_TOKEN)
    check_hub_access(repo_id)
    assert hub.count("POST|PUT") == 0 and set(hub.repos) == {REPO}


@pytest.mark.parametrize("action", [500, 429, "close", "hang"])
def test_a_failing_hub_is_named(hub, action, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_DEADLINE_S", 0.2)
    for request in ("GET /api/whoami", "GET .*/auth-check"):
        hub.faults.clear()
        hub.fail(request, action)
        assert hub.url in message(RuntimeError, lambda: check_hub_access(REPO))


def with_layers(config: Path, number: int) -> None:
    config.write_text(config.read_text().replace('"num_hidden_layers": 4', f'"num_hidden_layers": {number}'))


DAMAGES: dict[str, Callable[[Path], object]] = {
    SHARDS[1]: lambda model: (model / SHARDS[1]).unlink(),
    "config.json": lambda model: (model / "config.json").unlink(),
    "11 unknown: model.language_model.layers.3": lambda model: with_layers(model / "config.json", 3),
    "model": lambda model: model.rename(model.with_name("elsewhere")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_incomplete_or_wrong_directory_is_rejected_without_a_token_or_request(hub, model, monkeypatch, name):
    DAMAGES[name](model)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("sys.argv", ["push", str(model), REPO])
    problem = message(ValueError, push.main)
    assert name in problem and "python -m model_port.export" in problem  # also if DIR is a run's checkpoint
    assert hub.requests == []


def test_an_adapter_is_not_called_an_incomplete_model(hub, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    problem = message(ValueError, lambda: push_to_hub(tmp_path, REPO))
    assert "is an adapter" in problem and "hf upload" in problem and "incomplete" not in problem
    assert hub.requests == []
