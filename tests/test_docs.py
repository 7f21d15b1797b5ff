"""README, docs and configs are correct: commands parse and run, links resolve, and listed folders exist.

A block that starts with `# needs …` is only parsed, and must name a requirement in `LACKING`. All other blocks of a
page run in order, in a separate directory with tiny models and synthetic rows.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import re
import runpy
import shlex
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training import QUICK

from paravt_jax.learner.settings import CORRECTIONS
from rollout.video.encode import write_video

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "configs" / "README.md"])
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "launch")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python -m |paravt |bash scripts/)[^`]+)`")
IN_HEADER = re.compile(r"^#   (python -m .*?)(?:  .*)?$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)]+)\)")
NAMED = re.compile(r"`((?:paravt_jax|model_port|rollout|configs|scripts|docs|tests)/[\w./-]*?(?:\.\w+|/))`")
NEEDS = "# needs "
LACKING = (  # machines, separate installations, users' own files, and commands that take over half a minute
    *("accelerator", "GPU", "machines", "network", "disk", "memory", "hour", "minutes", "of a processor"),
    *(".venv-sglang", "aot-gpu", "torch", "verl", "decord", "chromium", "openai", "qwen_vl_utils", "sglang-router"),
    *("server", "engine", "a run", "a policy", "a clone of EvolvingLMMs-Lab/ParaVT"),
)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
ELSEWHERE = {  # other projects' programs
    *("hf", "find", "export", "sglang-router", "lmms-eval"),
    *(".venv/bin/pre-commit", ".venv/bin/python"),
}
RUN_BY_CONFIG = {"paravt_jax.train", "paravt_jax.sft", "paravt_jax.eval"}
SHORTER = {
    "paravt_jax.train": [
        *(setting for setting in QUICK if setting != "data.validation="),
        "validation.max_prompts=1",
        "train.num_steps=1",
        "rollout.prompts.system=Call crop_video, zoom_frame or video_facts.",
    ],
    "paravt_jax.sft": ["sft.num_steps=1"],
}
PUBLISHED = "Qwen/Qwen3-VL-2B-Instruct"  # the tutorial's model; its test replaces it by `tiny`
MAX_README_BYTES, MAX_PICTURE_BYTES = 8_000, 200_000


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and not self.text.startswith(NEEDS)

    @property
    def file(self) -> str:
        """The file name under which the reader saves this example, or an empty string."""
        name = re.match(r"# (\w+\.py)\n", self.text)
        return name[1] if name else ""

    @property
    def commands(self) -> list[str]:
        return [line for line in self.text.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]


def blocks_of(page: Path) -> list[Block]:
    return [Block(*match.groups()) for match in BLOCK.finditer(page.read_text())]


def commands_of(page: Path) -> Iterator[str]:
    if page.suffix == ".yaml":
        yield from IN_HEADER.findall(page.read_text())
        return
    for block in blocks_of(page):
        if block.language == "bash":
            yield from block.commands
    yield from INLINE.findall(BLOCK.sub("", page.read_text()))


def main_of(module: str):
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ValueError(f"there is no module {module}")
    return importlib.import_module(f"{module}.__main__" if spec.submodule_search_locations else module).main


class WasRead(BaseException):
    """Raised with a command's parsed arguments instead of running it."""


@contextlib.contextmanager
def only_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes every command stop after it has parsed its arguments."""
    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
        yield


def stopping(parse: Callable[..., argparse.Namespace]) -> Callable[..., NoReturn]:
    def parse_and_stop(*args) -> NoReturn:
        raise WasRead(parse(*args))

    return parse_and_stop


def problem_with(command: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Returns the error of a command's parser or settings checks, or None."""
    program, *arguments = words_of(command)
    if program == "bash":
        return None if (ROOT / arguments[0]).is_file() else f"there is no {arguments[0]}"
    if program == "paravt":
        program, arguments = "python", ["-m", "paravt_jax", *arguments]
    if program != "python":
        return None if program in ELSEWHERE else f"pages may not use the program {program}"
    assert arguments[0] == "-m", f"{command}: start this project's programs with -m"
    _, module, *arguments = arguments
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()), monkeypatch.context() as patch:
        show = module in RUN_BY_CONFIG and any(word.startswith(("--config", "--show")) for word in arguments)
        patch.setattr(sys, "argv", [module, *arguments, *(["--show"] if show else [])])
        try:
            with contextlib.nullcontext() if show else only_read(monkeypatch):
                main_of(module)()
        except WasRead:
            return None
        except SystemExit:
            return errors.getvalue().splitlines()[-1]
        except (ValueError, OSError) as problem:
            return str(problem)
    return None


def words_of(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    while ASSIGNMENT.fullmatch(words[0]):
        del words[0]
    return words


def problems_of(page: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = [(command, problem_with(command, monkeypatch)) for command in commands_of(page)]
    return [f"{command}: {problem}" for command, problem in found if problem is not None]


@pytest.mark.parametrize("page", [*PAGES, *CONFIGS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documented_commands_are_accepted_by_their_parsers(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "docs"):
        Path(folder).symlink_to(ROOT / folder)
    for block in filter(lambda block: block.file, blocks_of(page)):
        Path(block.file).write_text(block.text)
    assert problems_of(page, monkeypatch) == []


@pytest.mark.parametrize(
    "text",
    [
        "```bash\npython -m model_port.convert --src tiny --to tiny.ckpt\n```\n",
        "```bash\n# needs the network\npython -m model_port.nothing --src tiny\n```\n",
        "```bash\npython -m paravt_jax.train --config configs/smoke_cpu.yaml \\\n    train.steps=3\n```\n",
        "Say `python -m paravt_jax.sft --config configs/missing.yaml`.\n",
        "Say `bash scripts/missing.sh`.\n",
        "```bash\nrm -rf runs\n```\n",
    ],
)
def test_a_documented_command_that_would_fail_is_detected(tmp_path, monkeypatch, text):
    monkeypatch.chdir(ROOT)
    (tmp_path / "page.md").write_text(text)
    assert len(problems_of(tmp_path / "page.md", monkeypatch)) == 1


def unexcused(page: Path) -> list[str]:
    """Lists reasons to skip a block that are not in `LACKING`, and unknown languages."""
    blocks = blocks_of(page)
    reasons = [block.text.splitlines()[0] for block in blocks if block.text.startswith(NEEDS)]
    unknown = {block.language for block in blocks} - {"", "bash", "python"}
    return [*(reason for reason in reasons if not any(name in reason for name in LACKING)), *sorted(unknown)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_skipped_block_names_a_requirement_that_the_tests_lack(page):
    assert unexcused(page) == []


def test_an_invalid_reason_to_skip_is_detected(tmp_path):
    text = "```bash\n# needs a minute\ntrue\n```\n```bash\n# needs a GPU\ntrue\n```\n```py\n1\n```\n"
    (tmp_path / "page.md").write_text(text)
    assert unexcused(tmp_path / "page.md") == ["# needs a minute", "py"]


# README and data.md run most of their commands, and test_extend.py the examples of extend.md; scale.md only plans.
NIGHTLY_PAGES = ("training.md", "machines.md", "rewards.md", "tutorial.md", "extend.md", "scale.md")
PAGES_WITH_COMMANDS_TO_RUN = [
    pytest.param(page, marks=[pytest.mark.nightly] * (page.name in NIGHTLY_PAGES))
    for page in PAGES
    if any(b.language == "bash" and b.runs for b in blocks_of(page))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS_TO_RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    make_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for block in filter(lambda block: runs_on(page, block), blocks_of(page)):
            if block.file:
                Path(block.file).write_text(block.text)
                runpy.run_path(block.file, run_name="__main__")
                continue
            if block.language == "python":
                exec(compile(block.text, str(page), "exec"), {})
                continue
            for command in block.commands:
                tiny = re.sub(r"checkpoints/[48]\b", "checkpoints/1", command).replace(PUBLISHED, "tiny")
                _, _, module, *arguments = words_of(tiny)
                shorter = [] if {"--plan", "--show"} & set(arguments) else SHORTER.get(module, [])
                monkeypatch.setattr(sys, "argv", [module, *arguments, *shorter])
                with without_an_answer() if module == "paravt_jax.ask" else nullcontext():
                    main_of(module)()
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def without_an_answer() -> Iterator[None]:
    """Allows only one failure: a barely trained model may give no answer."""
    try:
        yield
    except RuntimeError as problem:
        if not str(problem).startswith("no answer: "):
            raise


def runs_on(page: Path, block: Block) -> bool:
    """Whether a test runs a block. It also runs the tutorial's GPU blocks, with a tiny model on the CPU."""
    reason = block.text.splitlines()[0]
    return block.runs or (page.name == "tutorial.md" and block.language == "bash" and "network" not in reason)


def make_world(directory: Path) -> None:
    """Writes the files that the pages assume: videos, published rows, and traces with one call per turn."""
    for folder in ("configs", "docs"):
        (directory / folder).symlink_to(ROOT / folder)
    for folder in ("videos", "rows/sft", "rows/rl"):
        (directory / folder).mkdir(parents=True)
    for name, shade in (("kitchen", 40), ("street", 200)):
        pictures = (np.full((48, 64, 3), shade + second, np.uint8) for second in range(8))
        write_video(directory / "videos" / f"{name}.mp4", pictures, 1)
    own = {
        "prompt": [{"role": "user", "content": "<video>\nWhich pan is red?"}],
        "videos": [{"video": "videos/kitchen.mp4"}],
        "extra_info": {"question_type": "oe", "answer": "the first"},
    }
    (directory / "own.jsonl").write_text(json.dumps(own) + "\n")
    questions = [
        {
            "prompt": [{"role": "user", "content": "<video>\nWhich one?"}],
            "videos": [{"video": f"selfqa/{number // 2}.mp4"}],
            "extra_info": json.dumps({"answer": answer, "question_type": kind}),
        }
        for number, (kind, answer) in enumerate([("mcq", "A"), ("tvg", "[1, 2]"), ("oe", "red")] * 100)
    ]
    for kind in ("sft", "rl"):
        pq.write_table(pa.Table.from_pylist(questions), directory / "rows" / kind / f"paravt_{kind}.parquet")


def slug(heading: str) -> str:
    """Returns the anchor of a heading in rendered Markdown."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists():
            dead.append(link)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", target.read_text()), re.MULTILINE)
            dead += [link] * (anchor not in map(slug, headings))
    return dead


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_of_a_page_exist(page):
    assert dead_links(page) == []
    assert [name for name in NAMED.findall(page.read_text()) if not (ROOT / name).exists()] == []


def test_dead_links_and_anchors_are_detected(tmp_path):
    text = "# One\n[a](gone.md) [b](#one) [c](#two) [d](page.md#one) [e](https://host/x) [f](#\none)\n"
    (tmp_path / "page.md").write_text(text)
    assert dead_links(tmp_path / "page.md") == ["gone.md", "#two", "#\none"]


def tree_of_the_readme() -> dict[str, str]:
    """Returns each folder in the README's tree with its description."""
    (tree,) = re.findall(r"^## The tree\n\n```\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    clauses: dict[str, str] = {}
    for line in tree.splitlines():
        name, clause = line.strip().split(maxsplit=1)
        top = next((path for path in reversed(clauses) if path.count("/") == 1), "")
        clauses[f"{top}{name}" if line.startswith(" ") else name] = clause
    return clauses


def test_the_reference_lists_only_names_that_exist():
    listed = [
        (module, name)
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for module, names in re.findall(
            r"^::: (\S+)\n    options: {members: \[(.*)\]}$", page.read_text(), re.MULTILINE
        )
        for name in names.split(", ")
    ]
    assert len(listed) > 50
    assert [entry for entry in listed if not hasattr(importlib.import_module(entry[0]), entry[1])] == []


def test_the_readme_lists_the_folders_that_exist():
    clauses = tree_of_the_readme()
    assert [name for name in clauses if not (ROOT / name).is_dir()] == []
    named = [f"{folder}{file}" for folder, clause in clauses.items() for file in re.findall(r"\w+\.py\b", clause)]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    packages = {path.parent for top in ("model_port", "rollout", "paravt_jax") for path in (ROOT / top).rglob("*.py")}
    ours = {f"{path.relative_to(ROOT).as_posix()}/" for path in packages if "shim" not in path.parts}
    assert ours | {"configs/", "scripts/", "docs/", "tests/"} <= set(clauses)


def test_the_readme_and_all_images_are_small():
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README_BYTES
    pictures = [path for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{kind}")]
    assert pictures
    assert [path.name for path in pictures if path.stat().st_size > MAX_PICTURE_BYTES] == []


def test_the_training_loop_in_the_docs_is_the_code():
    (shown,) = (block.text for block in blocks_of(ROOT / "docs" / "architecture.md") if block.language == "python")
    code = [line.strip() for line in (ROOT / "paravt_jax" / "train.py").read_text().splitlines()]
    lines = [line.strip() for line in shown.splitlines()]
    assert lines in [code[n : n + len(lines)] for n in range(len(code))]


def test_the_docs_list_the_default_bounds_of_corrections():
    page = (ROOT / "docs" / "training.md").read_text()
    (table,) = re.findall(r"^\| `loss.correction` (.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` (?:\(.*?\) )?(?:\|[^|]*){2}\|([^|]*)\|", table, re.MULTILINE)
    bounds = {name: re.findall(r"`(\w+)` ([\d.]+)", cell) for name, cell in rows}
    assert {name: {bound: float(value) for bound, value in each} for name, each in bounds.items()} == CORRECTIONS


@pytest.mark.slow
def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.findall(r"^## \[(.*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    cited = dict(re.findall(r"^(version|date-released): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert newest == (version, cited["date-released"]) and cited["version"] == version
