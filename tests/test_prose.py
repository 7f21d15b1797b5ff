"""Docs, comments and names use plain words: maximum rates per 1,000 words or names."""

import pytest

from scripts.counts import (
    BOUNDS,
    MAX_VAGUE,
    MIN_YOU,
    ROOT,
    YOU,
    bound_names,
    code_files,
    comments_text,
    docs_text,
    rate,
    vague_rate,
)


@pytest.fixture(scope="module")
def texts() -> tuple[str, str]:
    return docs_text(ROOT), comments_text(ROOT)


@pytest.mark.parametrize("name", BOUNDS)
def test_docs_and_comments_use_plain_words(name, texts):
    bound = BOUNDS[name]
    docs, comments = (rate(bound.pattern, text) for text in texts)
    assert docs <= bound.docs and comments <= bound.comments, (docs, comments)


def test_docs_address_the_reader(texts):
    assert rate(YOU, texts[0]) >= MIN_YOU


@pytest.mark.parametrize("package", ["model_port", "rollout", "scripts", "paravt_jax"])
def test_names_are_not_vague(package):
    assert vague_rate(code_files(ROOT, [package])) <= MAX_VAGUE


def test_code_and_tables_do_not_count():
    assert rate("what", "one two `what` three\n| what |\n") == 0
    assert rate("what", "what two") == 500


def test_every_name_that_a_file_binds_counts():
    source = "class A:\n    def f(self, found):\n        self.said = told = 1\n        for one in found: print(one)\n"
    assert sorted(bound_names(source)) == ["A", "f", "found", "one", "said", "self", "told"]
