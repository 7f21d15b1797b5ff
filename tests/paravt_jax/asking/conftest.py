"""Shared by the tests of asking."""

import pytest

from model_port.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from rollout.chat import Chat


@pytest.fixture(scope="module")
def chat():
    return Chat(tiny_tokenizer(), CHAT_TEMPLATE)


@pytest.fixture
def videos(tmp_path):
    directory = tmp_path / "videos"
    directory.mkdir()
    (directory / "a.mp4").write_bytes(b"any")
    return directory
