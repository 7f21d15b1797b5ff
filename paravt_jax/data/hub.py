"""Resolves paths of rows that name a data set on the hub: OWNER/NAME or OWNER/NAME/SUB/DIR, either with @REVISION.

An existing local path has precedence. A name is also local if its first folder exists or is called `data`, where the
configs expect the output of `materialize`. A name with a revision, for example `data/sft@main`, is always on the hub.
Only parquet and JSON-lines files of the named directory are downloaded, to huggingface_hub's cache, but no videos.
"""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from model_port.bucket import downloaded, is_address
from model_port.hub import reason_of, transferring
from model_port.output_dir import check_local

LOCAL_FOLDER = "data"
ROW_SUFFIXES = (".parquet", ".jsonl")
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)((?:/[^/@\\]+)*)(?:@([^@\s]+))?")
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class HubName:
    repo: str  # OWNER/NAME
    inside: str  # a directory or file in the repository; empty: its root
    revision: str | None  # a branch, a tag or a commit

    def __str__(self) -> str:
        inside = f"/{self.inside}" if self.inside else ""
        return f"{self.repo}{inside}" + (f"@{self.revision}" if self.revision else "")


def hub_name(path: str) -> HubName | None:
    """Parses a path as a name on the hub, or returns None if it can only be local, for example data/train.parquet."""
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
    """The path itself if it exists, else the downloaded rows of the data set on the hub."""
    if is_address(path):
        return downloaded(path, lambda name: name.endswith((*ROW_SUFFIXES, ".json")))
    name = hub_name(str(path))
    check_local(path)
    if Path(path).exists():
        return Path(path)
    folder = Path(path).parts[0]
    if name is None and folder == LOCAL_FOLDER:
        raise ValueError(
            f"{path} does not exist; make it from published rows with python -m paravt_jax.data materialize and split "
            f"(docs/data.md has all commands), or give the path of your own rows"
        )
    if name is None:
        return Path(path)  # reading the file reports errors
    if name.revision is None and (folder == LOCAL_FOLDER or Path(folder).is_dir()):
        made = f" (python -m paravt_jax.data materialize --output-dir {name} creates it from published rows)"
        here = "does not exist here" + ("" if name.inside.endswith(ROW_SUFFIXES) else made)
        raise ValueError(f"{name} {here}; for the data set {name.repo} on the hub, write {path}@main")
    inside = glob.escape(f"{name.inside}/") if name.inside else ""
    patterns = [f"{inside}*{suffix}" for suffix in ROW_SUFFIXES]
    if name.inside.endswith(ROW_SUFFIXES):
        patterns = [glob.escape(name.inside)]
    # In huggingface_hub's patterns `*` also matches slashes.
    rows = _snapshot(name, patterns, [f"{inside}*/*"]) / name.inside
    if rows.is_file() or any(rows.glob("*.parquet")):
        return rows
    json_lines = sorted(rows.glob("*.jsonl"))
    if len(json_lines) == 1:
        return json_lines[0]
    raise ValueError(_no_rows(name, [file.name for file in json_lines]))


def downloaded_files(name: HubName, pattern: str) -> list[Path]:
    """Downloads the files of a data set that match a pattern, in which `*` does not match slashes."""
    files = sorted(_snapshot(name, [pattern], []).glob(pattern))
    if not files:
        raise ValueError(f"the data set {name} on the hub has no {pattern}; its layout differs from the expected one")
    return files


def _snapshot(name: HubName, patterns: list[str], ignored: list[str]) -> Path:
    """Downloads the matching files of a data set and returns its directory."""
    try:
        with transferring(f"downloading {name}"):
            return Path(
                snapshot_download(
                    name.repo,
                    repo_type="dataset",
                    revision=name.revision,
                    allow_patterns=patterns,
                    ignore_patterns=ignored,
                )
            )
    except Exception as problem:  # hf_xet raises undocumented types
        flag = f" --revision {name.revision}" if name.revision else ""
        by_hand = (
            f"run `hf download --repo-type dataset {name.repo}{flag} --local-dir DIR` on a machine with network access "
            f"and name {f'DIR/{name.inside}' if name.inside else 'DIR'} instead"
        )
        advice = f"check the name, the revision, your access and the network, or {by_hand}"
        if constants.HF_HUB_OFFLINE:
            advice = f"unset HF_HUB_OFFLINE, or {by_hand}"
        raise RuntimeError(
            f"{name} does not exist here, and the data set {name.repo} could not be downloaded from the hub "
            f"({reason_of(problem)}); {advice}"
        ) from problem


def row_files(source: Path) -> list[Path]:
    """The file itself, or all .parquet files below a directory, except in hidden folders.

    In the hub's cache, subfolders are skipped, because they belong to downloads under other names.
    """
    if not source.is_dir():
        return [source]
    is_cached = Path(constants.HF_HUB_CACHE) in source.parents
    files = sorted(source.glob("*.parquet") if is_cached else source.rglob("*.parquet"))
    return [file for file in files if not any(step.startswith(".") for step in file.relative_to(source).parts)]


def tokenizer_file(source: str) -> Path:
    """Finds tokenizer.json in a Hugging Face directory, or downloads it from a model on the hub."""
    local = Path(source)
    if local.exists() or not HUB_NAME.fullmatch(source):
        file = local / TOKENIZER_FILE if local.is_dir() else local
        if file.name != TOKENIZER_FILE or not file.is_file():
            raise ValueError(f"{source} has no {TOKENIZER_FILE}; name the directory of a model, or its id on the hub")
        return file
    try:
        with transferring(f"downloading {source}"):
            return Path(hf_hub_download(source, TOKENIZER_FILE))
    except Exception as problem:
        raise RuntimeError(
            f"{source} is not a directory here, and its {TOKENIZER_FILE} could not be downloaded from the hub "
            f"({reason_of(problem)}); check the name and the network, or name the directory of a model"
        ) from problem


def _no_rows(name: HubName, lines: list[str]) -> str:
    if lines:
        return f"the data set {name} has {len(lines)} JSON-lines files; name one, for example {name.repo}/{lines[0]}"
    try:
        tree = get_cached_repo_tree(name.repo, repo_type="dataset", revision=name.revision)
    except CachedRepoTreeNotFoundError:
        tree = []
    folders = sorted({str(Path(file.path).parent) for file in tree if file.path.endswith(ROW_SUFFIXES)})
    paths = ", ".join(f"{name.repo}/{folder}".removesuffix("/.") for folder in folders)
    hint = f"; it has some in {paths}" if paths else ""
    return f"the data set {name} has no parquet or JSON-lines files there{hint}"
