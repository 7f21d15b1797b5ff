"""Docs and comments use plain words, and names say what they name: bounds per 1,000 words or names."""

import pytest

from scripts.counts import BOUNDS, MIN_YOU, ROOT, YOU, comments_text, docs_text, rate


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


def test_code_and_tables_do_not_count():
    assert rate("what", "one two `what` three\n| what |\n") == 0
    assert rate("what", "what two") == 500
