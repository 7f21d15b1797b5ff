import fcntl
import os
import stat

from rollout.owned_directory import orphans, owned_directory


def test_another_hosts_directory_stays_if_only_file_locks_are_shared(tmp_path, monkeypatch):
    """Simulates NFS, where locks of directories are local to a host."""
    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None if stat.S_ISDIR(os.fstat(fd).st_mode) else lock(fd, how))
    with owned_directory(tmp_path, "weights-") as theirs:
        (theirs / "all").mkdir()
        with owned_directory(tmp_path, "weights-") as ours:
            assert (theirs / "all").is_dir() and list(orphans([tmp_path], "weights-")) == []
        assert not ours.exists()
    assert list(tmp_path.iterdir()) == []


def test_files_left_by_a_removal_are_removed_later(tmp_path):
    """NFS renames an open file on deletion, so its directory can be removed only after it is closed."""
    (tmp_path / "weights-x").mkdir()
    with owned_directory(tmp_path, "weights-") as ours:
        assert list(tmp_path.iterdir()) == [ours]
