"""Data sets on the hub, wherever a path to rows is: OWNER/NAME, OWNER/NAME/SUB/DIR, and either with @REVISION.

What exists locally always wins. A name is local where its first folder exists, or is called `data`: that is where our
configs have what `materialize` makes. With a revision, as `data/sft@main`, it is the hub's. Only the parquet and
JSON-lines files of the directory that was asked for are downloaded, not those of the whole repository, into the cache
of the hub's client; videos are not rows and stay there.
"""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from model_port.bucket import downloaded, is_address
from model_port.hub import transferring
from model_port.output_dir import check_local

LOCAL_FOLDER = "data"
ROW_SUFFIXES = (".parquet", ".jsonl")
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)((?:/[^/@\\]+)*)(?:@([^@\s]+))?")
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class HubName:
    repo: str  # OWNER/NAME
    inside: str  # a directory or file of it; empty: its top
    revision: str | None  # a branch, a tag or a commit

    def __str__(self) -> str:
        inside = f"/{self.inside}" if self.inside else ""
        return f"{self.repo}{inside}" + (f"@{self.revision}" if self.revision else "")


def hub_name(path: str) -> HubName | None:
    """What a path means on the hub, or None where it can only be local.

    `data/train.parquet` is a file that is not there, whatever may be called so on the hub.
    """
    match = HUB_NAME.fullmatch(path)
    if match is None:
        return None
    repo, inside, revision = match.groups()
    steps = inside.split("/")[1:]
    if any(step in (".", "..") for step in steps) or repo.endswith("/.."):
        return None
    if Path(path).suffix in (*ROW_SUFFIXES, ".json") and (not steps or Path(path).parent.is_dir()):
        return None
    return HubName(repo, "/".join(steps), revision)


def local_source(path: str | Path) -> Path:
    """The path itself, or where the rows of that data set lie after a download; a path that exists always wins."""
    if is_address(path):
        return downloaded(path, lambda name: name.endswith((*ROW_SUFFIXES, ".json")))
    name = hub_name(str(path))
    check_local(path)
    if Path(path).exists() or name is None:
        return Path(path)  # whoever reads it says what is wrong with it
    folder = Path(path).parts[0]
    if name.revision is None and (folder == LOCAL_FOLDER or Path(folder).is_dir()):
        raise ValueError(
            f"{name} does not exist here (python -m paravt_jax.data materialize --output-dir {name} makes it from "
            f"published rows); if the data set {name.repo} of the hub is meant, write {path}@main"
        )
    inside = glob.escape(f"{name.inside}/") if name.inside else ""
    wanted = [f"{inside}*{suffix}" for suffix in ROW_SUFFIXES]
    if name.inside.endswith(ROW_SUFFIXES):
        wanted = [glob.escape(name.inside)]
    # In patterns of the hub's client a `*` also stands for slashes.
    found = _snapshot(name, wanted, [f"{inside}*/*"]) / name.inside
    if found.is_file() or any(found.glob("*.parquet")):
        return found
    lines = sorted(found.glob("*.jsonl"))
    if len(lines) == 1:
        return lines[0]
    raise ValueError(_no_rows(name, [file.name for file in lines]))


def downloaded_files(name: HubName, pattern: str) -> list[Path]:
    """The files of a data set that a pattern names, downloaded; in the pattern a `*` stands for no slash."""
    root = _snapshot(name, [pattern], [])
    found = sorted(root.glob(pattern))
    if not found:
        raise ValueError(f"the data set {name} of the hub has no {pattern}; it is laid out differently than was known")
    return found


def _snapshot(name: HubName, wanted: list[str], unwanted: list[str]) -> Path:
    """Where a data set lies, once the files that are wanted of it are there."""
    try:
        with transferring(f"downloading {name}"):
            return Path(
                snapshot_download(
                    name.repo,
                    repo_type="dataset",
                    revision=name.revision,
                    allow_patterns=wanted,
                    ignore_patterns=unwanted,
                )
            )
    except Exception as problem:  # hf_xet raises types that it does not document
        raise RuntimeError(_not_downloaded(name, problem)) from problem


def row_files(source: Path) -> list[Path]:
    """A file itself; of a directory all .parquet files in it and below, except in folders that begin with a dot.

    Of what was downloaded only the directory itself: what lies deeper there was asked for by another name.
    """
    if not source.is_dir():
        return [source]
    downloaded = Path(constants.HF_HUB_CACHE) in source.parents
    files = sorted(source.glob("*.parquet") if downloaded else source.rglob("*.parquet"))
    return [file for file in files if not any(step.startswith(".") for step in file.relative_to(source).parts)]


def tokenizer_file(source: str) -> Path:
    """tokenizer.json of a Hugging Face directory, or of a model on the hub."""
    local = Path(source)
    if local.exists() or not HUB_NAME.fullmatch(source):
        file = local / TOKENIZER_FILE if local.is_dir() else local
        if file.name != TOKENIZER_FILE or not file.is_file():
            raise ValueError(f"{source} has no {TOKENIZER_FILE}; give the directory of a model, or its id on the hub")
        return file
    try:
        with transferring(f"downloading {source}"):
            return Path(hf_hub_download(source, TOKENIZER_FILE))
    except Exception as problem:
        raise RuntimeError(
            f"{source} is no directory here, and its {TOKENIZER_FILE} could not be downloaded from the hub "
            f"({_reason(problem)}); check the name and the network, or give the directory of a model"
        ) from problem


def _not_downloaded(name: HubName, problem: Exception) -> str:
    revision = f" --revision {name.revision}" if name.revision else ""
    by_hand = (
        f"run `hf download --repo-type dataset {name.repo}{revision} --local-dir DIR` on a machine that is online and "
        f"give {f'DIR/{name.inside}' if name.inside else 'DIR'} instead"
    )
    if constants.HF_HUB_OFFLINE:
        advice = f"unset HF_HUB_OFFLINE, or {by_hand}"
    else:
        advice = f"check the name, the revision, your access and the network, or {by_hand}"
    return (
        f"{name} does not exist here, and the data set {name.repo} could not be downloaded from the hub "
        f"({_reason(problem)}); {advice}"
    )


def _reason(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__


def _no_rows(name: HubName, lines: list[str]) -> str:
    if lines:
        return (
            f"the data set {name} has {len(lines)} JSON-lines files; give one of them, such as {name.repo}/{lines[0]}"
        )
    try:
        tree = get_cached_repo_tree(name.repo, repo_type="dataset", revision=name.revision)
    except CachedRepoTreeNotFoundError:
        tree = []
    places = sorted({str(Path(file.path).parent) for file in tree if file.path.endswith(ROW_SUFFIXES)})
    hint = (
        f"; it has some in {', '.join(f'{name.repo}/{place}'.removesuffix('/.') for place in places)}" if places else ""
    )
    return f"the data set {name} has no parquet or JSON-lines files there{hint}"
