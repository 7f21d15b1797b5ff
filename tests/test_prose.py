"""Docs, comments and names use plain words: maximum rates per 1,000 words or names."""

import pytest

from scripts import counts


@pytest.fixture(scope="module")
def texts() -> tuple[str, str]:
    return counts.docs_text(counts.ROOT), counts.comments_text(counts.ROOT)


@pytest.mark.parametrize("name", counts.BOUNDS)
def test_docs_and_comments_use_plain_words(name, texts):
    bound = counts.BOUNDS[name]
    docs, comments = (counts.rate(bound.pattern, text) for text in texts)
    assert docs <= bound.docs and comments <= bound.comments, (docs, comments)


def test_docs_address_the_reader(texts):
    assert counts.rate(counts.YOU, texts[0]) >= counts.MIN_YOU


@pytest.mark.parametrize("package", ["model_port", "rollout", "scripts", "paravt_jax"])
def test_names_are_not_vague(package):
    assert counts.vague_rate(counts.code_files(counts.ROOT, [package])) <= counts.MAX_VAGUE


def test_code_and_tables_do_not_count():
    assert counts.rate("what", "one two `what` three\n| what |\n") == 0
    assert counts.rate("what", "what two") == 500


def test_every_name_that_a_file_binds_counts():
    source = "class A:\n    def f(self, found):\n        self.said = told = 1\n        for one in found: print(one)\n"
    assert sorted(counts.bound_names(source)) == ["A", "f", "found", "one", "said", "self", "told"]
