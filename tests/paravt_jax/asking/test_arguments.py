import asyncio

import pytest

from paravt_jax.ask import _files_and_question
from paravt_jax.asking.asker import engine_of, open_asker


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


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:1"]])
def test_weights_are_only_downloaded_to_sample_in_this_process(urls, is_adapter, tmp_path, monkeypatch):
    patterns, model = [], "you/model"
    if is_adapter:
        model = str(tmp_path)
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "you/model"}')

    def download(repo, allow_patterns):
        patterns.extend(allow_patterns)
        raise OSError("no network")

    monkeypatch.setattr("model_port.download.snapshot_download", download)
    asker = open_asker(model, engine_of(model, urls, [], ""), num_frames=None, dispatch=None)
    with pytest.raises(RuntimeError, match="you/model is not a directory and could not be downloaded"):
        asyncio.run(asker.__aenter__())
    assert {"tokenizer.json", "adapter_config.json"} <= {*patterns} and ("*.safetensors" in patterns) == (not urls)
