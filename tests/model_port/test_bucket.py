"""Models in a bucket are read and written atomically despite errors; on loopback, with tensorstore's real driver."""

import numpy as np
import pytest

import model_port
from model_port import bucket as module
from model_port.bucket import ABSENT, UPLOADING, Bucket, Conflict, downloaded
from model_port.convert import convert
from model_port.export import export, export_adapter
from model_port.output_dir import LIST_FILE, output_directory
from model_port.tiny import make_tiny


def put(**files):
    for name, content in files.items():
        (Bucket.of("gs://bkt/dir") / name).write(content)


def write(text="new", force=False):
    with output_directory("gs://bkt/dir", force=force) as directory:
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text(text)


def fails_first(times, fault, methods=("GET", "POST", "DELETE")):
    """Returns a fault of the first `times` requests."""
    left = iter(range(times))
    return lambda method, name: fault if method in methods and next(left, None) is not None else None


@pytest.mark.parametrize("url", ["gs://bkt", "gs://bkt/", "gs://b/x", "gs://bkt/a/../b", "gs://bkt//x", "gs://BKT/x"])
def test_an_invalid_url_is_rejected(url):
    with pytest.raises(ValueError, match="does not name a directory in a bucket"):
        Bucket.of(url)


@pytest.mark.slow
def test_a_model_survives_a_bucket_roundtrip_bit_for_bit(gcs, tmp_path):
    make_tiny("gs://bkt/tiny")
    convert("gs://bkt/tiny", "gs://bkt/models/tiny.ckpt")
    export("gs://bkt/models/tiny.ckpt", "gs://bkt/models/tiny.hf")
    make_tiny(tmp_path / "tiny")
    weights = (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert gcs.objects["bkt/models/tiny.hf/model.safetensors"][1] == weights
    one, other = model_port.load(tmp_path / "tiny"), model_port.load("gs://bkt/models/tiny.ckpt")
    ids = np.arange(7)
    assert (model_port.logits(one, ids) == model_port.logits(other, ids)).all()
    assert not [name for name in gcs.objects if name.endswith(UPLOADING)]


@pytest.mark.parametrize(
    "fault", [503, *(pytest.param(fault, marks=pytest.mark.slow) for fault in (429, 500, "lost", "stall"))]
)
def test_transient_errors_are_retried(gcs, fault):
    gcs.fault = fails_first(3, fault)
    write("one")
    gcs.fault = fails_first(3, fault)
    assert (downloaded("gs://bkt/dir") / "deep" / "file").read_text() == "one"


@pytest.mark.parametrize(
    ("fault", "reason"), [(503, "retried for"), ("stall", "no answer in"), (403, "GOOGLE_APPLICATION_CREDENTIALS")]
)
def test_permanent_errors_are_one_line(gcs, fault, reason, monkeypatch):
    write()
    monkeypatch.setattr(module, "DEADLINE_S", 0.1)
    gcs.fault = lambda method, name: fault
    with pytest.raises(RuntimeError, match=rf"^gs://bkt/dir could not be listed \(.*{reason}[^\n]*$"):
        downloaded("gs://bkt/dir")


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_an_incomplete_upload_is_never_read_and_the_next_upload_replaces_it(gcs, method):
    gcs.fault = lambda asked, name: 403 if asked == method and (method == "DELETE" or LIST_FILE in name) else None
    with pytest.raises(RuntimeError, match="could not be"):
        write("half")
    gcs.fault = lambda method, name: None
    with pytest.raises(ValueError, match="gs://bkt/dir is incomplete"):
        downloaded("gs://bkt/dir")
    write("whole")
    assert (downloaded("gs://bkt/dir") / "deep" / "file").read_text() == "whole"


def test_an_interrupted_replacement_is_completed_by_the_next_upload(gcs):
    with output_directory("gs://bkt/dir") as directory:
        (directory / "shard-2-of-2").write_text("one")
    gcs.fault = lambda asked, name: 403 if asked == "DELETE" else None
    with pytest.raises(RuntimeError, match="could not be deleted"):
        write("two", force=True)
    gcs.fault = lambda method, name: None
    write("two")
    assert Bucket.of("gs://bkt/dir").names() == [LIST_FILE, "deep/file"]


def after_listing(gcs, name, change):
    """Changes the bucket once, at the first request for an object."""
    changes = iter([change])

    def fault(method, asked):
        if asked == name and method == "GET":
            next(changes, lambda: None)()
        return None

    gcs.fault = fault


def set_object(gcs, name, content):
    gcs.last += 1
    gcs.objects[name] = gcs.last, content


@pytest.mark.parametrize("part_bytes", [2, 64])
def test_an_object_that_changes_during_a_download_is_rejected_and_the_next_one_succeeds(gcs, part_bytes, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    put(a=b"123")
    after_listing(gcs, "bkt/dir/a", lambda: set_object(gcs, "bkt/dir/a", b"1234567"))
    with pytest.raises(ValueError, match=r"gs://bkt/dir changed during the download; start again"):
        downloaded("gs://bkt/dir")
    assert (downloaded("gs://bkt/dir") / "a").read_bytes() == b"1234567"


@pytest.mark.parametrize("new", [{UPLOADING: b"{}"}, {"a": b"new", "b": b"new"}], ids=["an upload", "other weights"])
def test_a_directory_that_is_replaced_during_a_download_is_rejected(new, gcs):
    put(a=b"old", b=b"old")
    after_listing(gcs, "bkt/dir/b", lambda: [set_object(gcs, f"bkt/dir/{name}", new[name]) for name in new])
    with pytest.raises(ValueError, match=r"gs://bkt/dir changed during the download; start again"):
        downloaded("gs://bkt/dir")


def test_objects_that_are_not_downloaded_may_change(gcs):
    put(a=b"1")
    after_listing(gcs, "bkt/dir/a", lambda: set_object(gcs, "bkt/dir/log", b"a line"))
    assert (downloaded("gs://bkt/dir", lambda name: name != "log") / "a").read_bytes() == b"1"


def test_only_our_own_files_are_replaced(gcs):
    write("one")
    with pytest.raises(ValueError, match="gs://bkt/dir already exists"):
        write("two")
    write("two", force=True)
    assert gcs.objects["bkt/dir/deep/file"][1] == b"two"
    put(notes=b"mine")
    with pytest.raises(ValueError, match=r"gs://bkt/dir has notes, which this program did not write"):
        write("three", force=True)
    assert gcs.objects["bkt/dir/deep/file"][1] == b"two" and gcs.objects["bkt/dir/notes"][1] == b"mine"
    with pytest.raises(ValueError, match="gs://bkt/new already exists"), output_directory("gs://bkt/new"):
        Bucket.of("gs://bkt/new/notes").write(b"of another program")
    assert gcs.names("bkt/new/") == {"notes"}
    for command in (convert, export, export_adapter):
        with pytest.raises(ValueError, match="gs://bkt/dir/deep is in gs://bkt/dir, which would be replaced"):
            command("gs://bkt/dir/deep", "gs://bkt/dir", force=True)


def test_a_directory_name_is_not_matched_as_a_prefix(gcs):
    Bucket.of("gs://bkt/dir2/x").write(b"other")
    write("one")
    write("two", force=True)
    assert gcs.objects["bkt/dir2/x"][1] == b"other" and Bucket.of("gs://bkt/dir").names() == [LIST_FILE, "deep/file"]


def test_a_download_is_incremental_and_removes_deleted_files(gcs):
    put(a=b"1", b=b"2")
    here = downloaded("gs://bkt/dir")
    put(a=b"3")
    (Bucket.of("gs://bkt/dir") / "b").delete()
    put(c=b"4")
    downloaded("gs://bkt/dir")
    assert {path.name: path.read_bytes() for path in here.glob("?")} == {"a": b"3", "c": b"4"}
    inodes = [(here / name).stat().st_ino for name in "ac"]
    downloaded("gs://bkt/dir")
    assert [(here / name).stat().st_ino for name in "ac"] == inodes


def test_a_large_object_is_downloaded_in_parts_of_one_generation(gcs, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 4)
    put(a=b"0123456789", b=b"01234567", c=b"")
    here = downloaded("gs://bkt/dir")
    assert [(here / name).read_bytes() for name in "abc"] == [b"0123456789", b"01234567", b""]
    put(a=b"new content of a")

    def change(method, name):
        if name == "bkt/dir/a" and method == "GET":
            set_object(gcs, name, b"and yet another!")

    gcs.fault = change
    with pytest.raises(ValueError, match="gs://bkt/dir/a changed during the download"):
        downloaded("gs://bkt/dir")
    assert (here / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize("name", ["../../outside", "a//b", "./x"])
def test_an_object_name_that_leaves_the_directory_is_rejected(gcs, name, tmp_path):
    gcs.objects[f"bkt/dir/{name}"] = (1, b"evil")
    with pytest.raises(ValueError, match="which is not a file name"):
        downloaded("gs://bkt/dir")
    assert not list(tmp_path.rglob("outside"))


def test_a_missing_directory_is_reported(gcs):
    with pytest.raises(ValueError, match="gs://bkt/gone does not exist"):
        model_port.load("gs://bkt/gone")


def test_another_process_object_is_not_overwritten(gcs):
    one = Bucket.of("gs://bkt/owner")
    generation = one.write(b"mine", ABSENT)
    with pytest.raises(Conflict, match="gs://bkt/owner was written by another process"):
        one.write(b"theirs", ABSENT)
    gcs.fault = fails_first(1, "lost", ["POST"])
    again = one.write(b"renewed", generation)  # the response is lost, so the retry finds its own object
    assert one.read() == (b"renewed", again) and again != generation


def test_a_rejected_write_is_an_error(gcs):
    gcs.fault = lambda method, name: 412 if method == "POST" else None
    with pytest.raises(Conflict):
        Bucket.of("gs://bkt/x").write(b"1")
    assert not gcs.objects
