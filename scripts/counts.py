"""Counts lines, settings, phrases and names:   python -m scripts.counts   writes `now` in docs/results/data/size.json

Rates of phrases are per 1,000 words of docs or of comments and docstrings, without code, links and tables; rates of
vague names are per 1,000 names that the code binds.
"""

import argparse
import ast
import datetime
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paravt_jax.config import Config, EvalConfig, SftConfig, keys

ROOT = Path(__file__).parents[1]
SIZE_FILE = ROOT / "docs" / "results" / "data" / "size.json"
PACKAGES = ("model_port", "rollout", "paravt_jax")
NOT_PROSE = (r"(?s)```.*?```", r"`[^`]*`", r"(?<=\])\([^)]*\)", r"<[^>]+>", r"(?m)^\s*\|.*$")


@dataclass(frozen=True)
class Bound:
    """A phrase that makes text hard to read, and the maximum number of matches per 1,000 words."""

    pattern: str
    docs: float
    comments: float


BOUNDS = {
    "what": Bound(r"\b(what|whatever|whoever|whichever)\b", 2.5, 3.0),
    "said": Bound(r"\b(said|told|says|say|tells|tell)\b", 0.8, 0.8),
    "that of": Bound(r"\b(that of|those of|of its own|of their own|of one)\b", 0.5, 0.5),
    "begun": Bound(
        r"\b(begun|goes on|go on|gone on|lies|lie|stands|stand|meanwhile|amid|likewise|whose|whom)\b", 1.0, 1.0
    ),
}
YOU, MIN_YOU = r"\b(you|your)\b", 3.0  # in docs
VAGUE = {
    *("found", "said", "told", "asked", "one", "place", "known", "shown", "before", "there", "seen", "given", "taken"),
    *(
        "kept",
        "made",
        "had",
        "left",
        "what",
        "whole",
        "rest",
        "others",
        "away",
        "late",
        "here",
        "held",
        "wanted",
        "meant",
    ),
}
MAX_VAGUE = 5.0


def code_files(root: Path, folders: Iterable[str] = PACKAGES) -> list[Path]:
    return [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]


def docs_text(root: Path) -> str:
    files = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return "\n".join(file.read_text() for file in files)


def comments(source: str) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*docstrings, *(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)])


def comments_text(root: Path) -> str:
    return "\n".join(comments(file.read_text()) for file in code_files(root))


def rate(pattern: str, text: str) -> float:
    """Counts matches per 1,000 words, without code, links and tables."""
    for part in NOT_PROSE:
        text = re.sub(part, " ", text)
    return 1000 * len(re.findall(pattern, text, re.I)) / len(re.findall(r"[A-Za-z']+", text))


def bound_names(source: str) -> Iterator[str]:
    """Yields the variables, parameters, functions, classes and attributes that a file binds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def vague_rate(files: Iterable[Path]) -> float:
    names = [name for file in files for name in bound_names(file.read_text())]
    return 1000 * sum(name.lstrip("_") in VAGUE for name in names) / len(names)


def num_lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def num_settings() -> int:
    """Counts the keys that any command accepts; a mapping such as loss.params counts once."""
    return len({key for schema in (Config, SftConfig, EvalConfig) for key in keys.keys_of(schema)})


def counts(root: Path) -> dict[str, float]:
    docs, code = docs_text(root), comments_text(root)
    result = {
        "lines of the wheel": num_lines(code_files(root)),
        "lines of tests": num_lines(code_files(root, ["tests"])),
        "settings": num_settings(),
    }
    for name, bound in BOUNDS.items():
        result |= {f'"{name}" in docs': rate(bound.pattern, docs), f'"{name}" in comments': rate(bound.pattern, code)}
    result |= {f"vague names in {package}": vague_rate(code_files(root, [package])) for package in PACKAGES}
    return {name: round(value, 1) for name, value in (result | {'"you" in docs': rate(YOU, docs)}).items()}


AIMS = {"lines of the wheel": 31_000, "lines of tests": 24_000, "settings": 115, '"you" in docs': MIN_YOU}
AIMS |= {f'"{name}" in docs': bound.docs for name, bound in BOUNDS.items()}
AIMS |= {f'"{name}" in comments': bound.comments for name, bound in BOUNDS.items()}
AIMS |= {f"vague names in {package}": MAX_VAGUE for package in PACKAGES}


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m scripts.counts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    size = json.loads(SIZE_FILE.read_bytes())
    size |= {"date": datetime.date.today().isoformat(), "now": counts(ROOT)}
    SIZE_FILE.write_text(json.dumps(size, indent=2) + "\n")


if __name__ == "__main__":
    main()
