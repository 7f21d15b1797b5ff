"""A path may name a data set on the hub. Tests use a fake hub on loopback and cannot reach any other host."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_rows import dialogue, rl_row, sft_row, write_parquet
from fake_hub import FakeHub, fresh_client
from huggingface_hub import constants
from hypothesis import given, strategies as st
from published import make_copy

from model_port.download import source_directory
from paravt_jax.data.hub import HubName, hub_name, local_source, tokenizer_file
from paravt_jax.data.inspect import inspect
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.splits import SPLITS
from paravt_jax.data.splits.reading import load_samples
from paravt_jax.data.traces import load_traces

REPO = "ada/questions"
BY_HAND = "run `hf download --repo-type dataset ada/questions --local-dir DIR`"


def line(answer: str) -> bytes:
    return json.dumps(rl_row(answer, video=__file__)).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub whose client has neither cache nor token, in an empty working directory."""
    with fresh_client(monkeypatch, tmp_path / "home") as server:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        yield server


@pytest.fixture
def questions(hub: FakeHub) -> FakeHub:
    videos = {"rl/video.mp4": b"frames", "video.mp4": b"frames"}
    hub.add_repo(REPO, files={"train.jsonl": line("A"), "rl/deep/a.jsonl": line("B")} | videos, private=False)
    return hub


def answer_of(path: str) -> str:
    return load_prompts(path, video_root="", max_bad_frac=0.0).prompts[0].answer


def downloaded(hub: FakeHub) -> set[str]:
    return {request.split("/resolve/")[1].split("/", 1)[1] for request in hub.requests if "/resolve/" in request}


def message(path: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        local_source(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_data_set_is_downloaded_and_read_like_a_local_one_also_offline(questions, monkeypatch):
    assert answer_of(REPO) == "A"
    assert questions.count(f"GET /api/datasets/{REPO}") > 0 and questions.count("GET /api/models") == 0
    assert downloaded(questions) == {"train.jsonl"}  # neither subfolders nor videos
    assert inspect(REPO).counts["question_types"] == {"mcq": 1}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    questions.requests.clear()
    assert answer_of(REPO) == "A" and questions.requests == []


def test_a_directory_or_a_file_of_a_data_set_can_be_named(questions):
    assert answer_of(f"{REPO}/rl/deep") == answer_of(f"{REPO}/rl/deep/a.jsonl") == "B"
    assert downloaded(questions) == {"rl/deep/a.jsonl"}


def test_parquet_files_are_read_as_a_directory_without_its_subfolders(hub):
    files = {"train.jsonl": b"{}"}
    for name in ("b.parquet", "a.parquet", "deep/c.parquet"):
        rows = [sft_row(dialogue("Q", "<answer>B</answer>"), id=name)]
        files[f"data/{name}"] = write_parquet(Path(name), rows).read_bytes()
    hub.add_repo(REPO, files=files, private=False)
    for path, expected in ((f"{REPO}/data/deep", ["deep/c.parquet"]), (f"{REPO}/data", ["a.parquet", "b.parquet"])):
        traces = load_traces(path, video_root="", max_bad_frac=0.0).traces
        assert [trace.id for trace in traces] == expected


def test_the_rows_of_a_split_are_downloaded_with_their_revision_and_without_videos(hub, tmp_path):
    root = make_copy("videomme", tmp_path / "copy")
    files = {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*.*")}
    hub.add_repo("lmms-lab/Video-MME", files=files, private=False)
    loaded = load_samples(SPLITS["videomme"], "", video_root=str(root), max_bad_frac=0.0)
    assert len(loaded.samples) == 3 and downloaded(hub) == {"videomme/test-00000-of-00001.parquet"}
    assert loaded.revision == hub.repos["lmms-lab/Video-MME"].branches["main"]
    with pytest.raises(ValueError, match=r"has no video of data\.split=videomme"):
        load_samples(SPLITS["videomme"], "", video_root="", max_bad_frac=0.0)


def test_a_revision_is_another_version(questions):
    repo = questions.repos[REPO]
    repo.commit("refs/pr/3", {**questions.files(REPO), "train.jsonl": line("C")})
    repo.branches["v2"] = repo.branches["refs/pr/3"]
    assert answer_of(f"{REPO}@v2") == "C" and answer_of(f"{REPO}@{repo.branches['main']}") == "A"
    assert answer_of(f"{REPO}/rl/deep@v2") == "B"


def test_an_existing_local_path_always_wins(questions):
    Path("ada/questions").mkdir(parents=True)
    Path("ada/questions/mine.jsonl").write_bytes(line("D"))
    assert local_source(REPO) == Path(REPO)
    assert answer_of(f"{REPO}/mine.jsonl") == "D"
    Path("ada/train.jsonl").write_bytes(line("E"))
    assert answer_of("ada/train.jsonl") == "E" and questions.requests == []


@pytest.mark.parametrize("name", [REPO, "data/sft"])
def test_a_name_in_a_local_folder_is_local_unless_it_has_a_revision(questions, name):
    Path("ada").mkdir()
    assert message(name) == (
        f"{name} does not exist here (python -m paravt_jax.data materialize --output-dir {name} creates it from "
        f"published rows); for the data set {name} on the hub, write {name}@main"
    )
    assert questions.requests == []
    assert answer_of(f"{REPO}@main") == "A"


def test_a_missing_file_in_a_local_folder_is_not_said_to_come_from_materialize(questions):
    Path("ada").mkdir()
    name = f"{REPO}/rows.jsonl"
    assert message(name) == f"{name} does not exist here; for the data set {REPO} on the hub, write {name}@main"


ONLY_LOCAL = ("ada/gone.jsonl", "gone.parquet", "./ada/questions", "/ada/questions", "../ada/q")
RECIPES = "data/rl.parquet", r"^data/rl\.parquet does not exist; make .*materialize and split \(docs/data\.md"


@pytest.mark.parametrize(("path", "problem"), [RECIPES, *((path, "does not exist") for path in ONLY_LOCAL)])
def test_a_path_that_can_only_be_local_is_not_requested(questions, path, problem):
    with pytest.raises(ValueError, match=problem):
        answer_of(path)
    assert questions.requests == []


def test_an_error_of_the_hub_has_no_signature_of_a_url(hub, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("refused\nfor url: https://cdn/blob?X-Amz-Signature=abc")

    for module in ("paravt_jax.data.hub", "model_port.download"):
        monkeypatch.setattr(f"{module}.snapshot_download", refuse)
    assert "(OSError, refused for url: https://cdn/blob);" in message(REPO)
    with pytest.raises(RuntimeError, match=r"\(OSError, refused for url: https://cdn/blob\);"):
        source_directory("ada/model")


@pytest.mark.parametrize("path", ["ada/gone", f"{REPO}@v9", f"{REPO}/rl/deep@v9"])
def test_a_name_that_is_neither_local_nor_on_the_hub_is_reported_with_advice(questions, path):
    error = message(path)
    assert error.startswith(f"{path} does not exist here, and the data set ada/") and "materialize" not in error
    assert "check the name, the revision, your access and the network, or run `hf download --repo-type dataset" in error


def test_a_failing_hub_is_reported_with_the_download_command(questions, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    questions.fail("GET /api/datasets", 500)
    assert BY_HAND in message(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert f"unset HF_HUB_OFFLINE, or {BY_HAND} on a machine with network access and name DIR inst" in message(REPO)


def test_a_directory_without_rows_or_with_several_files_lists_the_choices(questions):
    assert message(f"{REPO}/rl") == (
        f"the data set {REPO}/rl has no parquet or JSON-lines files there; it has some in {REPO}, {REPO}/rl/deep"
    )
    questions.add_repo("ada/two", files={"a.jsonl": line("A"), "b.jsonl": line("B")}, private=False)
    assert message("ada/two") == "the data set ada/two has 2 JSON-lines files; name one, for example ada/two/a.jsonl"


def test_a_tokenizer_is_downloaded_without_the_model(hub):
    hub.add_repo("ada/model", files={"tokenizer.json": b"{}", "model.safetensors": b"weights"}, private=False)
    assert tokenizer_file("ada/model").read_bytes() == b"{}"
    assert downloaded(hub) == {"tokenizer.json"}
    with pytest.raises(RuntimeError, match=r"ada/gone is not a directory here, and its tokenizer\.json could not"):
        tokenizer_file("ada/gone")


@given(st.text(st.sampled_from("ab/@.-_ \\:"), max_size=16))
def test_hub_file_names_cannot_leave_the_download_directory(path):
    name = hub_name(path)
    if name is not None:
        assert ".." not in name.inside.split("/") and not name.inside.startswith("/")
        assert hub_name(str(name)) == name


def test_names_are_parsed_by_part():
    assert hub_name("ada/q") == HubName("ada/q", "", None)
    assert hub_name("ada/q/sub/dir@refs/pr/3") == HubName("ada/q", "sub/dir", "refs/pr/3")
    assert hub_name("ada/q@main") == HubName("ada/q", "", "main")
    for path in ("ada", "ada/", "ada/q/", "ada//q", "ada/q@", "ada/q/../x", "-/q", "ada/q x", "synthetic"):
        assert hub_name(path) is None
