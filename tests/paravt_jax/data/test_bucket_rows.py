"""Rows in a bucket are those of the same files on this disk."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_gcs import fake_gcs

from paravt_jax.data.hub import local_source
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.synthetic import make_synthetic


@pytest.fixture
def gcs(monkeypatch, tmp_path):
    with fake_gcs(monkeypatch, tmp_path / "cache") as server:
        yield server


def put(gcs, name, path):
    gcs.last += 1
    gcs.objects[f"bkt/{name}"] = gcs.last, path.read_bytes()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "dir"])
def test_the_rows_of_a_bucket_are_read_and_read_anew_when_they_change(name, gcs, tmp_path):
    for content in ("first", "second"):
        if name == "rows.jsonl":
            (tmp_path / name).write_text(json.dumps({"row": content}) + "\n")
            put(gcs, f"data/{name}", tmp_path / name)
            assert content in local_source(f"gs://bkt/data/{name}").read_text()
            continue
        pq.write_table(pa.table({"row": [content]}), tmp_path / "x.parquet")
        put(gcs, "data/dir/x.parquet" if name == "dir" else f"data/{name}", tmp_path / "x.parquet")
        put(gcs, "data/dir/film.mp4", tmp_path / "x.parquet")
        found = local_source(f"gs://bkt/data/{name}")
        assert pq.read_table(found)["row"].to_pylist() == [content]
        assert not list(tmp_path.rglob("film.mp4"))  # which is no row


def test_a_run_reads_its_prompts_from_a_bucket(gcs, tmp_path):
    made = make_synthetic(tmp_path / "synthetic", 0)
    put(gcs, "train.jsonl", made)
    there = load_prompts("gs://bkt/train.jsonl", video_root=str(made.parent), max_bad_frac=0.0)
    here = load_prompts(str(made), video_root=str(made.parent), max_bad_frac=0.0)
    assert [prompt.question for prompt in there.prompts] == [prompt.question for prompt in here.prompts]


def test_rows_that_are_not_there_are_one_sentence(gcs):
    with pytest.raises(ValueError, match=r"gs://bkt/none\.parquet does not exist"):
        load_prompts("gs://bkt/none.parquet", video_root="", max_bad_frac=0.0)
