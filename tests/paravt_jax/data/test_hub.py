"""A path may name a data set on the hub, against a fake hub on loopback; no test can reach any other host."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from fake_hub import FakeHub, serve_hub
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from published import make_copy

from paravt_jax.data.hub import HubName, hub_name, local_source, tokenizer_file
from paravt_jax.data.inspect import inspect
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.splits import SPLITS
from paravt_jax.data.splits.reading import load_samples
from paravt_jax.data.traces import load_traces

REPO = "ada/questions"
BY_HAND = "run `hf download --repo-type dataset ada/questions --local-dir DIR`"


def lines(answer: str) -> bytes:
    row = {
        "prompt": [{"role": "user", "content": "<video>\nWhich?"}],
        "videos": [{"video": __file__}],
        "extra_info": {"answer": answer, "question_type": "mcq"},
    }
    return json.dumps(row).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The client as after a fresh install, in a place without files; it read its environment when it was imported."""
    resolve = socket.getaddrinfo

    def resolve_loopback(host: str, *args, **kwargs):
        assert host == "127.0.0.1", f"a test reached for {host}"
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_loopback)
    with serve_hub(tmp_path / "hub") as served:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        settings = {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        yield served
        huggingface_hub.close_session()


@pytest.fixture
def questions(hub: FakeHub) -> FakeHub:
    files = {
        "train.jsonl": lines("A"),
        "rl/deep/a.jsonl": lines("B"),
        "rl/video.mp4": b"frames",
        "video.mp4": b"frames",
    }
    hub.add_repo(REPO, files=files, private=False)
    return hub


def answer_of(path: str) -> str:
    return load_prompts(path, video_root="", max_bad_frac=0.0).prompts[0].answer


def downloaded(hub: FakeHub) -> set[str]:
    return {request.split("/resolve/")[1].split("/", 1)[1] for request in hub.requests if "/resolve/" in request}


def test_a_data_set_is_downloaded_and_read_as_if_it_were_here(questions):
    assert answer_of(REPO) == "A"
    assert questions.count(f"GET /api/datasets/{REPO}") > 0 and questions.count("GET /api/models") == 0
    assert downloaded(questions) == {"train.jsonl"}  # nothing of what lies deeper, and no video
    assert inspect(REPO).counts["question_types"] == {"mcq": 1}


def test_a_directory_or_a_file_within_is_found(questions):
    assert answer_of(f"{REPO}/rl/deep") == answer_of(f"{REPO}/rl/deep/a.jsonl") == "B"
    assert downloaded(questions) == {"rl/deep/a.jsonl"}


def test_parquet_files_are_read_as_a_directory_of_them(hub):
    import pyarrow as pa
    import pyarrow.parquet as pq

    said = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<answer>B</answer>"}]
    for name in ("a", "b"):
        pq.write_table(pa.Table.from_pylist([{"id": name, "messages": said}]), f"{name}.parquet")
    files = {f"data/{name}.parquet": Path(f"{name}.parquet").read_bytes() for name in ("b", "a")}
    hub.add_repo(REPO, files={**files, "train.jsonl": b"{}"}, private=False)
    found = load_traces(f"{REPO}/data", video_root="", max_bad_frac=0.0)
    assert [trace.id for trace in found.traces] == ["a", "b"]


def test_the_rows_of_a_split_are_downloaded_with_their_revision_and_no_video(hub, tmp_path):
    root = make_copy("videomme", tmp_path / "copy")
    files = {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*.*")}
    hub.add_repo("lmms-lab/Video-MME", files=files, private=False)
    found = load_samples(SPLITS["videomme"], "", video_root=str(root), max_bad_frac=0.0)
    assert len(found.samples) == 3 and downloaded(hub) == {"videomme/test-00000-of-00001.parquet"}
    assert found.revision == hub.repos["lmms-lab/Video-MME"].branches["main"]
    with pytest.raises(ValueError, match=r"has no video of data\.split=videomme"):
        load_samples(SPLITS["videomme"], "", video_root="", max_bad_frac=0.0)


def test_what_was_downloaded_under_another_name_is_not_read_with_it(hub):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(lines("A"))]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
    content = Path("a.parquet").read_bytes()
    hub.add_repo(REPO, files={"rl/a.parquet": content, "rl/deep/b.parquet": content}, private=False)
    for path in (f"{REPO}/rl/deep", f"{REPO}/rl"):
        assert len(load_prompts(path, video_root="", max_bad_frac=0.0).prompts) == 1


def test_a_revision_is_another_version(questions):
    repo = questions.repos[REPO]
    repo.commit("refs/pr/3", {**questions.files(REPO), "train.jsonl": questions.store(lines("C"))})
    repo.branches["v2"] = repo.branches["refs/pr/3"]
    assert answer_of(f"{REPO}@v2") == "C" and answer_of(f"{REPO}@{repo.branches['main']}") == "A"
    assert answer_of(f"{REPO}/rl/deep@v2") == "B"


def test_what_exists_here_always_wins(questions):
    Path("ada/questions").mkdir(parents=True)
    Path("ada/questions/mine.jsonl").write_bytes(lines("D"))
    assert local_source(REPO) == Path(REPO)
    assert answer_of(f"{REPO}/mine.jsonl") == "D"
    Path("ada/train.jsonl").write_bytes(lines("E"))
    assert answer_of("ada/train.jsonl") == "E" and questions.requests == []


@pytest.mark.parametrize("name", [REPO, "data/sft"])
def test_a_name_whose_first_folder_is_here_or_ours_is_local_unless_it_has_a_revision(questions, name):
    Path("ada").mkdir()
    assert message(name) == (
        f"{name} does not exist here (python -m paravt_jax.data materialize --output-dir {name} creates it from "
        f"published rows); for the data set {name} on the hub, write {name}@main"
    )
    assert questions.requests == []
    assert answer_of(f"{REPO}@main") == "A"


@pytest.mark.parametrize(
    "path", ["ada/gone.jsonl", "gone.parquet", "./ada/questions", "/ada/questions", "../ada/questions"]
)
def test_what_can_only_be_local_is_never_asked_for(questions, path):
    with pytest.raises(ValueError, match="does not exist"):
        answer_of(path)
    assert questions.requests == []


def test_what_was_downloaded_is_read_offline(questions, monkeypatch):
    answer_of(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    questions.requests.clear()
    assert answer_of(REPO) == "A" and questions.requests == []


def message(path: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        local_source(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_is_neither_here_nor_on_the_hub_is_named_in_both_readings(questions):
    said = message("ada/gone")
    assert said.startswith("ada/gone does not exist here, and the data set ada/gone could not be downloaded")
    assert "materialize" not in said


@pytest.mark.parametrize("path", [f"{REPO}@v9", f"{REPO}/rl/deep@v9"])
def test_what_the_hub_does_not_have_is_named_with_what_to_do(questions, path):
    said = message(path)
    assert said.startswith(f"{path} does not exist here, and the data set ada/")
    assert "check the name, the revision, your access and the network, or run `hf download --repo-type dataset" in said


def test_a_hub_in_trouble_is_named(questions, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    questions.fail("GET /api/datasets", 500)
    assert BY_HAND in message(REPO)


def test_a_place_without_rows_says_where_there_are_some(questions):
    assert message(f"{REPO}/rl") == (
        f"the data set {REPO}/rl has no parquet or JSON-lines files there; it has some in {REPO}, {REPO}/rl/deep"
    )


def test_several_files_of_lines_are_not_guessed_at(hub):
    hub.add_repo(REPO, files={"a.jsonl": lines("A"), "b.jsonl": lines("B")}, private=False)
    assert message(REPO) == f"the data set {REPO} has 2 JSON-lines files; name one, for example {REPO}/a.jsonl"


def test_a_tokenizer_is_downloaded_alone(hub):
    hub.add_repo("ada/model", files={"tokenizer.json": b"{}", "model.safetensors": b"weights"}, private=False)
    assert tokenizer_file("ada/model").read_bytes() == b"{}"
    assert downloaded(hub) == {"tokenizer.json"}
    with pytest.raises(RuntimeError, match=r"ada/gone is not a directory here, and its tokenizer\.json could not"):
        tokenizer_file("ada/gone")


@given(st.text(st.sampled_from("ab/@.-_ \\:"), max_size=16))
def test_no_name_on_the_hub_leads_out_of_its_download(path):
    name = hub_name(path)
    if name is not None:
        assert ".." not in name.inside.split("/") and not name.inside.startswith("/")
        assert hub_name(str(name)) == name


def test_names_are_read_part_by_part():
    assert hub_name("ada/q") == HubName("ada/q", "", None)
    assert hub_name("ada/q/sub/dir@refs/pr/3") == HubName("ada/q", "sub/dir", "refs/pr/3")
    assert hub_name("ada/q@main") == HubName("ada/q", "", "main")
    for path in ("ada", "ada/", "ada/q/", "ada//q", "ada/q@", "ada/q/../x", "-/q", "ada/q x", "synthetic"):
        assert hub_name(path) is None


def test_offline_the_command_says_what_to_do(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "paravt_jax.data", "inspect", REPO]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: {REPO} does not exist here") and done.stderr.count("\n") == 1
    assert f"unset HF_HUB_OFFLINE, or {BY_HAND} on a machine with network access and name DIR instead" in done.stderr
