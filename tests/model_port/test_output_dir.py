"""Writing a directory replaces only our own files."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from changed_files import edit

from model_port.output_dir import LIST_FILE, LOCK_FILE, SUMMED_BYTES, lock_file, output_directory


def write(dst, *, force=True, source=None, text="new"):
    with output_directory(dst, force=force, source=source) as directory:
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text(text)


def files(directory):
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file() and path.name != LIST_FILE
    }


@pytest.mark.parametrize(
    ("touch", "problem"),
    [
        (lambda dst: (dst / "notes.txt").write_text("mine"), "has notes.txt, which was added or changed"),
        (lambda dst: (dst / "deep" / "file").write_text("own"), "has deep/file, which was added or changed"),
        (lambda dst: os.utime(dst / "large", ns=(1, 1)), "has large, which was added or changed"),
        (lambda dst: (dst / "deep" / "gone").symlink_to(dst.parent), "has deep/gone, which was added or changed"),
        (lambda dst: (dst / LIST_FILE).unlink(), "was not written by this program"),
        (
            lambda dst: (dst / LIST_FILE).write_text('{"name": "dst", "files": ["deep/file"]}'),
            "has a list of files that this program did not write",
        ),
        (lambda dst: edit(dst / LIST_FILE, {"name": "old"}), "was written as old and moved here"),
    ],
)
def test_other_programs_files_are_never_replaced(touch, problem, tmp_path):
    dst = tmp_path / "dst"
    with output_directory(dst) as directory:
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text("old")
        (directory / "large").write_bytes(bytes(SUMMED_BYTES + 1))
    touch(dst)
    before = files(dst)
    with pytest.raises(ValueError, match=f"{problem}.*, so it is not replaced"):
        write(dst)
    assert files(dst) == before


def test_our_own_copied_and_empty_directories_are_replaced(tmp_path):
    (dst := tmp_path / "run" / "dst").mkdir(parents=True)
    write(dst, text="old")
    write(copy := shutil.copytree(dst, tmp_path / "dst", copy_function=shutil.copyfile))  # as with `cp -r`
    write(dst)
    assert files(dst) == files(copy) == {"deep/file": "new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "run"]


def test_all_content_is_synced_before_the_rename_and_its_parent_after(tmp_path, monkeypatch):
    synced, locked, partial = [], [], tmp_path / ".dst.partial"

    def fsync(file):
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        locked.append((tmp_path / "dst" / LOCK_FILE).exists())

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "dst")
    assert {partial, partial / LIST_FILE, partial / "deep", partial / "deep" / "file"} <= set(synced[:-1])
    assert synced[-1] == tmp_path and locked[-1]


def test_the_target_of_a_link_is_replaced_and_the_link_stays(tmp_path):
    write(tmp_path / "disk" / "dst", text="old")
    (tmp_path / "dst").symlink_to(tmp_path / "disk" / "dst")
    write(tmp_path / "dst")
    assert (tmp_path / "dst").is_symlink() and files(tmp_path / "disk" / "dst") == {"deep/file": "new"}


def test_a_live_writer_is_left_alone(tmp_path):
    with output_directory(tmp_path / "dst") as partial:
        (partial / "mine").touch()
        with pytest.raises(ValueError, match=r"another process is writing .*dst"):
            write(tmp_path / "dst")
    assert files(tmp_path / "dst") == {"mine": ""}


def test_a_lock_file_that_its_last_owner_replaces_before_it_is_locked_is_opened_again(tmp_path, monkeypatch):
    file, flock, replacements = tmp_path / LOCK_FILE, fcntl.flock, iter([lambda: (file.unlink(), file.touch())])
    monkeypatch.setattr(fcntl, "flock", lambda *args: (next(replacements, lambda: 0)(), flock(*args)))
    lock = lock_file(file, tmp_path)
    assert os.path.samestat(os.fstat(lock), file.stat())
    os.close(lock)


@pytest.mark.parametrize(("moment", "message"), [("body", "^worn out$"), ("rename", "worn out: '.*dst'$")])
def test_a_failed_replacement_leaves_the_old_content(moment, message, tmp_path, monkeypatch):
    def fail_if(now, *arguments):
        if now:
            raise OSError(*arguments)

    write(tmp_path / "dst", text="old")
    rename = Path.rename
    fails = lambda path, new: fail_if(path.name == ".dst.partial", 5, "worn out") or rename(path, new)  # noqa: E731
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match=message), output_directory(tmp_path / "dst", force=True):
        fail_if(moment == "body", "worn out")
    assert files(tmp_path / "dst") == {"deep/file": "old"} and [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_a_death_between_the_two_renames_loses_nothing(tmp_path):
    dst = tmp_path / "dst"
    write(dst, text="old")
    dst.rename(tmp_path / ".dst.replaced")
    (tmp_path / ".dst.partial").mkdir()
    with pytest.raises(ValueError, match=r"already exists; .* --force"):
        write(dst, force=False)
    assert files(dst) == {"deep/file": "old"} and [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_an_output_that_contains_its_source_is_rejected(tmp_path):
    dst = tmp_path / "dst"
    write(dst, text="old")
    (tmp_path / "link").symlink_to(dst)
    for source in (dst, dst / "deep", tmp_path / "link" / "deep"):
        with pytest.raises(ValueError, match=r"is in .*dst, which would be replaced"):
            write(dst, source=source)
    assert files(dst) == {"deep/file": "old"}


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/proc/new", "/proc/.new.partial: No such file or directory"),  # exists, but nothing can be created in it
        ("{tmp}/file/new", "{tmp}/file: File exists"),
        ("{tmp}/file/deep/new", "{tmp}/file/deep: Not a directory"),
        ("{tmp}/{long}", "{tmp}/.{long}.partial: File name too long"),
        ("{tmp}/taken", "{tmp}/.taken.partial/.lock: Too many levels of symbolic links"),
    ],
)
def test_an_unwritable_path_is_reported_immediately(place, reason, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / ".taken.partial").mkdir()
    (tmp_path / ".taken.partial" / ".lock").symlink_to(tmp_path / "gone" / "away")
    place, reason = (text.format(tmp=tmp_path, long=250 * "x") for text in (place, reason))
    with pytest.raises(ValueError, match=rf"^{place} cannot be written \({reason}\); choose another directory$"):
        write(Path(place))
