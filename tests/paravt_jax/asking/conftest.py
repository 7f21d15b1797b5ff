"""Fixtures of the tests of ask and serve."""

import pytest


@pytest.fixture
def videos(tmp_path):
    directory = tmp_path / "videos"
    directory.mkdir()
    (directory / "a.mp4").write_bytes(b"any")
    return directory
