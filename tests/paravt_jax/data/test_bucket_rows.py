"""Rows in a bucket are read like local files."""

import pytest
from data_rows import write_lines, write_parquet

from paravt_jax.data.hub import local_source
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.synthetic import make_synthetic


def put(gcs, name, path):
    gcs.last += 1
    gcs.objects[f"bkt/{name}"] = gcs.last, path.read_bytes()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "dir"])
def test_rows_of_a_bucket_are_read_again_when_they_change(name, gcs, tmp_path):
    for content in ("first", "second"):
        write = write_lines if name == "rows.jsonl" else write_parquet
        path = write(tmp_path / "rows", [{"row": content}])
        put(gcs, "data/dir/x.parquet" if name == "dir" else f"data/{name}", path)
        put(gcs, "data/dir/film.mp4", path)
        source = local_source(f"gs://bkt/data/{name}")
        assert (source / "x.parquet" if name == "dir" else source).read_bytes() == path.read_bytes()
        assert not list(tmp_path.rglob("film.mp4"))


def test_a_run_reads_its_prompts_from_a_bucket(gcs, tmp_path):
    path = make_synthetic(tmp_path / "synthetic", 0, num_videos=2)
    put(gcs, "train.jsonl", path)
    of_bucket = load_prompts("gs://bkt/train.jsonl", video_root=str(path.parent), max_bad_frac=0.0)
    assert of_bucket == load_prompts(path, video_root=str(path.parent), max_bad_frac=0.0)


def test_missing_rows_are_named(gcs):
    with pytest.raises(ValueError, match=r"gs://bkt/none\.parquet does not exist"):
        load_prompts("gs://bkt/none.parquet", video_root="", max_bad_frac=0.0)
