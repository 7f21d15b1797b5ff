"""Host 0 reads the other hosts' episodes, without parts that a killed run left."""

import math

import pytest
from fake_gcs import fake_gcs

from model_port.bucket import Bucket
from paravt_jax.run.episode_parts import EpisodeParts
from paravt_jax.run.hosts import Hosts


@pytest.fixture(params=["directory", "bucket"])
def directory(request, tmp_path, monkeypatch):
    if request.param == "directory":
        yield tmp_path
    else:
        with fake_gcs(monkeypatch, tmp_path / "cache"):
            yield Bucket.of("gs://bkt/runs/x")


def test_host_0_reads_other_hosts_lines_by_group_and_clears_them(directory):
    first, second, third = (EpisodeParts(directory, Hosts(index, 3)) for index in range(3))
    first.clear()
    third.write(6, {"7": [{"id": "from a run that was killed"}]})
    second.write(7, {"4": [{"id": "é", "value": 0.1}, {"id": "b", "value": math.nan}], "10": []})
    third.write(7, {"5": [{"id": "c"}]})
    lines = first.read(7)
    assert lines["4"].decode() == '{"id": "\\u00e9", "value": 0.1}\n{"id": "b", "value": null}\n'
    assert (lines["5"], lines["10"]) == (b'{"id": "c"}\n', b"") and lines.keys() == {"4", "5", "10"}
    first.clear()
    for step in (6, 7):
        with pytest.raises(FileNotFoundError):
            first.read(step)
