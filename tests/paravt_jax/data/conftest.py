import pytest


@pytest.fixture
def video_dir(tmp_path):
    """A directory with the files that rows refer to."""
    for name in ("a.mp4", "b.mp4", "b.png"):
        (tmp_path / name).write_bytes(b"frames")
    return tmp_path
