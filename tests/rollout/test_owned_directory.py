import fcntl
import os
import stat

from rollout.owned_directory import orphans, owned_directory


def test_a_directory_of_another_host_stays_where_only_locks_of_files_are_shared(tmp_path, monkeypatch):
    """As on NFS, where a lock of a directory counts on its host alone."""
    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None if stat.S_ISDIR(os.fstat(fd).st_mode) else lock(fd, how))
    with owned_directory(tmp_path, "weights-") as theirs:
        (theirs / "all").mkdir()
        with owned_directory(tmp_path, "weights-") as ours:
            assert (theirs / "all").is_dir() and list(orphans([tmp_path], "weights-")) == []
        assert not ours.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_after_a_removal_is_removed_later(tmp_path):
    """NFS keeps an open file under another name, so its directory can only be removed once it is closed."""
    (tmp_path / "weights-x").mkdir()
    with owned_directory(tmp_path, "weights-") as ours:
        assert list(tmp_path.iterdir()) == [ours]
