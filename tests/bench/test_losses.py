"""The comparison of losses covers every case, and detects a fault in each."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paravt_jax.learner.settings import CORRECTIONS
from paravt_jax.learner.variants import VARIANTS
from scripts.bench.loss_references import in_numpy
from scripts.bench.losses import cases, learners, table
from scripts.summary import RESULTS


@pytest.fixture(autouse=True)
def exact(float64):
    return


@pytest.mark.slow
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_loss_equals_its_own_reference_only(kind):
    """Tests a sample of the settings; `python -m scripts.bench losses` compares all."""
    for case in [*cases(kind)][::7]:
        ours, theirs = learners(case), in_numpy(case)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-14)
        np.testing.assert_allclose(ours.gradient, theirs.gradient, atol=1e-15)
        other = next(name for name in ("dr_grpo", "grpo") if name != kind)
        wrong = in_numpy(replace(case, loss=replace(case.loss, name=other, params={})))
        assert np.abs(ours.gradient - wrong.gradient).max() > 1e-6


def change(case, **without) -> float:
    """Returns the largest gradient change when an option of the loss is removed."""
    changed = replace(case, loss=replace(case.loss, **without))
    return float(np.abs(in_numpy(case).gradient - in_numpy(changed).gradient).max())


@pytest.mark.slow
def test_the_settings_reach_every_bound():
    """Each correction limits some weights, and the dual clip limits some ratios."""
    wide = {"correction": "token_tis", "correction_bounds": {"max_weight": 1e9}}
    for correction in CORRECTIONS:
        assert max(change(case, **wide) for case in cases("para_grpo") if case.loss.correction == correction) > 1e-3
    assert max(change(case, params={}) for case in cases("para_grpo")) > 1e-3


def test_the_page_has_the_table_of_its_data():
    page, data = (RESULTS / name for name in ("losses.md", "data/losses.json"))
    assert table(json.loads(data.read_text())) in page.read_text()


def test_the_table_names_the_reference_and_the_largest_differences():
    row = {"loss": "gspo", "reference": "verl", "settings": 36, "loss_difference": 7e-10, "gradient_difference": 1e-10}
    assert table({"rows": [row]}).splitlines()[-1] == "| `gspo` | verl | 36 | 7.0e-10 | 1.0e-10 |"
