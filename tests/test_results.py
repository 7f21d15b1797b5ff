"""The tables and plots of docs/results agree with their data."""

import json
import math
import re

import pytest

from scripts import results
from scripts.bench import decoders, losses
from scripts.summary import Line, met

PAGES = sorted(results.RESULTS.glob("*.md"))
DATA = sorted((results.RESULTS / "data").glob("*.json"))


def test_the_tables_of_the_page_are_computed_from_the_data():
    page = (results.RESULTS / "README.md").read_text()
    assert results.with_tables(page) == page, "run python -m scripts.results"
    assert "| lines of tests | " in page and "| [publish](hosts.md#publishing) to two real servers" in page


@pytest.mark.parametrize(("bench", "page"), [(decoders, "video"), (losses, "losses")])
def test_the_table_of_a_page_is_the_table_of_its_bench(bench, page):
    record = results.data(bench.__name__.rpartition(".")[2])
    assert bench.table(record) in (results.RESULTS / f"{page}.md").read_text()


def test_a_line_meets_its_target_only_if_all_values_do():
    assert [met(values, "≤ 1.5") for values in ([1.5], [1.6], [1, 2, 3])] == ["yes", "no", "1 of 3"]
    assert [met(values, "≥ 1.2") for values in ([1.2, 9], [math.nan])] == ["yes", "no"]
    assert str(Line("speed", [1.234, 0.5], "≥ 1.2")) == "| speed | 1.23; 0.50 × | ≥ 1.2 × | 1 of 2 |"


def test_a_line_of_many_values_has_their_range():
    assert str(Line("speed", [9.5, 10.25, 2000, 11])) == "| speed | 9.50 to 2,000.00 × | – | – |"


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_every_figure_has_its_command_date_and_machine(file):
    record = json.loads(file.read_bytes())
    assert re.search(r"scripts|paravt_jax|rollout", record["command"]) and record["machine"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])


@pytest.mark.slow
def test_every_picture_is_drawn_and_shown_on_a_page(tmp_path):
    shown = re.findall(r"\]\(img/(\w+)\.png\)", "".join(page.read_text() for page in PAGES))
    assert sorted(shown) == sorted(results.PICTURES)
    for name, panels in results.PICTURES.items():
        results.draw(panels(), tmp_path / f"{name}.png")
        assert (results.RESULTS / "img" / f"{name}.png").is_file()
