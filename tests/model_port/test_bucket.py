"""Models in a bucket: whole or refused, whatever the bucket does; on loopback, through tensorstore's own driver."""

import numpy as np
import pytest

import model_port
from model_port import bucket as module
from model_port.bucket import ABSENT, UPLOADING, Bucket, Conflict, downloaded
from model_port.convert import convert
from model_port.export import export
from model_port.output_dir import LIST_FILE, output_directory
from model_port.tiny import make_tiny


def put(**files):
    for name, content in files.items():
        (Bucket.of("gs://bkt/dir") / name).write(content)


def write(text="new", force=False):
    with output_directory("gs://bkt/dir", force=force) as directory:
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text(text)


def troubled(times, trouble, methods=("GET", "POST", "DELETE")):
    """The first so many requests are in trouble."""
    left = iter(range(times))
    return lambda method, name: trouble if method in methods and next(left, None) is not None else None


@pytest.mark.parametrize(
    "address", ["gs://bkt", "gs://bkt/", "gs://b/x", "gs://bkt/a/../b", "gs://bkt//x", "gs://BKT/x"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="does not name a directory in a bucket"):
        Bucket.of(address)


@pytest.mark.slow
def test_a_model_goes_into_a_bucket_and_comes_back_bit_for_bit(gcs, tmp_path):
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
    "trouble", [503, *(pytest.param(trouble, marks=pytest.mark.slow) for trouble in (429, 500, "lost", "stall"))]
)
def test_passing_trouble_is_tried_again(gcs, trouble):
    gcs.trouble = troubled(3, trouble)
    write("one")
    gcs.trouble = troubled(3, trouble)
    assert (downloaded("gs://bkt/dir") / "deep" / "file").read_text() == "one"


@pytest.mark.parametrize(
    ("trouble", "said"), [(503, "retried for"), ("stall", "no answer in"), (403, "GOOGLE_APPLICATION_CREDENTIALS")]
)
def test_lasting_trouble_is_one_sentence(gcs, trouble, said, monkeypatch):
    write()
    monkeypatch.setattr(module, "DEADLINE_S", 0.1)
    gcs.trouble = lambda method, name: trouble
    with pytest.raises(RuntimeError, match=rf"^gs://bkt/dir could not be listed \(.*{said}[^\n]*$"):
        downloaded("gs://bkt/dir")


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_directory_that_was_not_uploaded_to_its_end_is_never_read_and_is_replaced_by_the_next(gcs, method):
    gcs.trouble = lambda asked, name: 403 if asked == method and (method == "DELETE" or LIST_FILE in name) else None
    with pytest.raises(RuntimeError, match="could not be"):
        write("half")
    gcs.trouble = lambda method, name: None
    with pytest.raises(ValueError, match="gs://bkt/dir is incomplete"):
        downloaded("gs://bkt/dir")
    write("whole")
    assert (downloaded("gs://bkt/dir") / "deep" / "file").read_text() == "whole"


def test_an_upload_that_replaces_other_files_and_is_cut_off_is_replaced_by_the_next(gcs):
    with output_directory("gs://bkt/dir") as directory:
        (directory / "shard-2-of-2").write_text("one")
    gcs.trouble = lambda asked, name: 403 if asked == "DELETE" else None
    with pytest.raises(RuntimeError, match="could not be deleted"):
        write("two", force=True)
    gcs.trouble = lambda method, name: None
    write("two")
    assert Bucket.of("gs://bkt/dir").names() == [LIST_FILE, "deep/file"]


def after_listing(gcs, name, change):
    """Changes the bucket once, when the object is asked for."""
    changes = iter([change])

    def trouble(method, asked):
        if asked == name and method == "GET":
            next(changes, lambda: None)()
        return None

    gcs.trouble = trouble


def set_object(gcs, name, content):
    gcs.last += 1
    gcs.objects[name] = gcs.last, content


@pytest.mark.parametrize("part_bytes", [2, 64])
def test_an_object_that_grows_during_the_download_is_whole_or_refused_and_whole_the_next_time(
    gcs, part_bytes, monkeypatch
):
    monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    put(a=b"123")
    after_listing(gcs, "bkt/dir/a", lambda: set_object(gcs, "bkt/dir/a", b"1234567"))
    with pytest.raises(ValueError, match=r"gs://bkt/dir changed during the download; start again"):
        downloaded("gs://bkt/dir")
    assert (downloaded("gs://bkt/dir") / "a").read_bytes() == b"1234567"


@pytest.mark.parametrize("new", [{UPLOADING: b"{}"}, {"a": b"new", "b": b"new"}])  # and a model with other weights
def test_a_directory_that_is_replaced_during_the_download_is_refused(new, gcs):
    put(a=b"old", b=b"old")
    after_listing(gcs, "bkt/dir/b", lambda: [set_object(gcs, f"bkt/dir/{name}", new[name]) for name in new])
    with pytest.raises(ValueError, match=r"gs://bkt/dir changed during the download; start again"):
        downloaded("gs://bkt/dir")


def test_objects_that_are_not_downloaded_may_change_in_the_meantime(gcs):
    put(a=b"1")
    after_listing(gcs, "bkt/dir/a", lambda: set_object(gcs, "bkt/dir/log", b"a line"))
    assert (downloaded("gs://bkt/dir", lambda name: name != "log") / "a").read_bytes() == b"1"


def test_only_what_was_written_so_is_replaced(gcs):
    write("one")
    with pytest.raises(ValueError, match="gs://bkt/dir already exists"):
        write("two")
    write("two", force=True)
    assert gcs.objects["bkt/dir/deep/file"][1] == b"two"
    put(notes=b"mine")
    with pytest.raises(ValueError, match=r"gs://bkt/dir has notes, which this program did not write"):
        write("three", force=True)
    assert gcs.objects["bkt/dir/deep/file"][1] == b"two" and gcs.objects["bkt/dir/notes"][1] == b"mine"


def test_a_neighbour_with_a_longer_name_is_not_below(gcs):
    Bucket.of("gs://bkt/dir2/x").write(b"other")
    write("one")
    write("two", force=True)
    assert gcs.objects["bkt/dir2/x"][1] == b"other" and Bucket.of("gs://bkt/dir").names() == [LIST_FILE, "deep/file"]


def test_what_is_here_already_is_not_read_again_and_what_is_gone_there_goes_here(gcs):
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


def test_a_large_object_comes_in_parts_of_one_generation(gcs, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 4)
    put(a=b"0123456789", b=b"01234567", c=b"")
    here = downloaded("gs://bkt/dir")
    assert [(here / name).read_bytes() for name in "abc"] == [b"0123456789", b"01234567", b""]
    put(a=b"new content of a")

    def change(method, name):
        if name == "bkt/dir/a" and method == "GET":
            gcs.last += 1
            gcs.objects[name] = gcs.last, b"and yet another!"
        return None

    gcs.trouble = change
    with pytest.raises(ValueError, match="gs://bkt/dir/a changed during the download"):
        downloaded("gs://bkt/dir")
    assert (here / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize("name", ["../../outside", "a//b", "./x"])
def test_an_object_with_the_name_of_a_file_elsewhere_is_refused(gcs, name, tmp_path):
    gcs.objects[f"bkt/dir/{name}"] = (1, b"evil")
    with pytest.raises(ValueError, match="which is not a file name"):
        downloaded("gs://bkt/dir")
    assert not list(tmp_path.rglob("outside"))


def test_what_is_not_there_is_said(gcs):
    with pytest.raises(ValueError, match="gs://bkt/gone does not exist"):
        model_port.load("gs://bkt/gone")


def test_an_object_that_somebody_else_wrote_is_not_written_over(gcs):
    one = Bucket.of("gs://bkt/owner")
    generation = one.write(b"mine", ABSENT)
    with pytest.raises(Conflict, match="gs://bkt/owner was written by another process"):
        one.write(b"theirs", ABSENT)
    gcs.trouble = troubled(1, "lost", ["POST"])
    again = one.write(b"renewed", generation)  # the answer is lost, and the next attempt meets its own object
    assert one.read() == (b"renewed", again) and again != generation


def test_a_write_that_the_bucket_refuses_is_not_taken_for_one(gcs):
    gcs.trouble = lambda method, name: 412 if method == "POST" else None
    with pytest.raises(Conflict):
        Bucket.of("gs://bkt/x").write(b"1")
    assert not gcs.objects
