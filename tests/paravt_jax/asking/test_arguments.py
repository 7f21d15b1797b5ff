import pytest

from paravt_jax.ask import _files_and_question


@pytest.mark.parametrize(
    ("words", "files", "question"),
    [
        (["film.mp4", "Who comes in?"], ["film.mp4"], "Who comes in?"),
        (["Why?"], [], "Why?"),
        (["What is 3.5 + 4?"], [], "What is 3.5 + 4?"),
    ],
)
def test_the_question_comes_last(tmp_path, monkeypatch, words, files, question):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "film.mp4").touch()
    assert _files_and_question(words, False) == (files, question)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["flim.mp4", "Who?"], r"^flim\.mp4 is not a file"),
        (["flim.mp4"], r"^flim\.mp4 is not a file"),
        (["film.mp4"], "is not a question"),
        (["film.mp4", " "], "is not a question"),
    ],
)
def test_a_mistyped_file_is_not_a_question(tmp_path, monkeypatch, words, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "film.mp4").touch()
    with pytest.raises(ValueError, match=problem):
        _files_and_question(words, False)
