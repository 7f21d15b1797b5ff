"""Docs and comments use plain words: bounds per 1,000 words on phrases that make them hard to read."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = [file for package in ("model_port", "rollout", "paravt_jax") for file in sorted((ROOT / package).rglob("*.py"))]
NOT_PROSE = (r"(?s)```.*?```", r"`[^`]*`", r"(?<=\])\([^)]*\)", r"<[^>]+>", r"(?m)^\s*\|.*$")
AT_MOST = {  # in docs, in comments and docstrings
    r"\b(what|whatever|whoever|whichever)\b": (2.5, 3.0),
    r"\b(said|told|says|say|tells|tell)\b": (0.8, 0.8),
    r"\b(that of|those of|of its own|of their own|of one)\b": (0.5, 0.5),
    r"\b(begun|goes on|go on|gone on|lies|lie|stands|stand|meanwhile|amid|likewise|whose|whom)\b": (1.0, 1.0),
}
AT_LEAST_YOU = 3.0  # in docs


def comments(source: str) -> str:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*docstrings, *(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)])


def rate(pattern: str, text: str) -> float:
    """Matches per 1,000 words, without code, links and tables."""
    for part in NOT_PROSE:
        text = re.sub(part, " ", text)
    return 1000 * len(re.findall(pattern, text, re.I)) / len(re.findall(r"[A-Za-z']+", text))


@pytest.fixture(scope="module")
def texts() -> tuple[str, str]:
    return "\n".join(file.read_text() for file in DOCS), "\n".join(comments(file.read_text()) for file in CODE)


@pytest.mark.parametrize("pattern", AT_MOST)
def test_docs_and_comments_use_plain_words(pattern, texts):
    rates = [rate(pattern, text) for text in texts]
    assert all(each <= bound for each, bound in zip(rates, AT_MOST[pattern], strict=True)), rates


def test_docs_address_the_reader(texts):
    assert rate(r"\b(you|your)\b", texts[0]) >= AT_LEAST_YOU


def test_code_and_tables_do_not_count():
    assert rate("what", "one two `what` three\n| what |\n") == 0
    assert rate("what", "what two") == 500
