"""The figure and the table of docs/miniature/contrast.md.

python -m scripts.miniature.contrast_page     after new runs: rewrites both from docs/miniature/data/contrast.json
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Float

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from model_port.cli import run_cli
from paravt_jax.run.log import whole_file
from paravt_jax.run.plots import STYLE, running_mean
from scripts.miniature.arms import TITLES
from scripts.miniature.cells import BUDGETS, DATA, Row, read_rows
from scripts.miniature.contrast import ARMS, BEFORE_SFT, MEASURED, TRAINING, Policy
from scripts.miniature.map_page import MISSING, rewrite, with_table
from scripts.miniature.report import SMOOTHED_STEPS

PAGE, FIGURE = DATA.parent / "contrast.md", DATA.parent / "contrast.png"
STAGES = {BEFORE_SFT: "before SFT", "sft": "SFT", **{arm: TITLES[arm] for arm in ARMS}}
PANELS = {"f_tau": "f_τ", "parseable": "parseable", "kappa": "κ, calls an episode"}
PRIORS = {"strong": "#D55E00", "weak": "#0072B2"}  # colors
FAMILIES = {"qwen3_vl": ("Qwen3-VL", "-"), "qwen2_5_vl": ("Qwen2.5-VL", "--")}
EFFECTS = "Differences of means over training: between the priors"  # starts the line that compares them


def held_out(rows: Sequence[Row], policy: Policy, arm: str, metric: str, *frames: int) -> Float[np.ndarray, " seeds"]:
    """Returns means over frame budgets, with the prefix of the arm's training."""
    chosen = [row for row in _of(rows, policy, arm) if row["frames"] in (frames or BUDGETS)]
    chosen = [row for row in chosen if row["forced"] == (arm == "para_grpo")]
    seeds = sorted({row["seed"] for row in chosen})
    return np.array([np.mean([row[metric] for row in chosen if row["seed"] == seed]) for seed in seeds])


def curves(rows: Sequence[Row], policy: Policy, arm: str, metric: str) -> Float[np.ndarray, "seeds steps"]:
    lines = [row[metric] for row in _of(rows, policy, arm) if row["dispatch"] == TRAINING]
    return np.array(lines, float).reshape(len(lines), -1 if lines else 0)


def _of(rows: Sequence[Row], policy: Policy, arm: str) -> list[Row]:
    wanted = policy.family, policy.prior, arm
    return [row for row in rows if (row["family"], row["prior"], row["arm"]) == wanted]


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| prior, family | stage | f_τ | parseable | κ | κ, K = {', '.join(map(str, BUDGETS))} | accuracy |"
    yield f"|{'---|' * 7}"
    for prior, (family, (title, _)), stage in product(PRIORS, FAMILIES.items(), STAGES):
        of_stage = rows, Policy(family, prior), stage
        means = [_spread(held_out(*of_stage, metric)) for metric in (*PANELS, "accuracy")]
        means.insert(3, " ".join(_mean(held_out(*of_stage, "kappa", frames)) for frames in BUDGETS))
        yield f"| {prior}, {title} | {STAGES[stage]} | {' | '.join(means)} |"


def _mean(values: Float[np.ndarray, " seeds"]) -> str:
    return f"{values.mean():.2f}" if len(values) else MISSING


def _spread(values: Float[np.ndarray, " seeds"]) -> str:
    return f"{_mean(values)} ({values.min():.2f} to {values.max():.2f})" if len(values) > 1 else _mean(values)


def effects(rows: Sequence[Row]) -> str:
    """Formats how much means over the training differ between the priors, and between the families."""
    parts = []
    for arm, metric in product(ARMS, PANELS):
        cells = [[curves(rows, Policy(family, prior), arm, metric) for family in FAMILIES] for prior in PRIORS]
        if all(len(cell) for of_prior in cells for cell in of_prior):
            means = np.array([[cell.mean() for cell in of_prior] for of_prior in cells])
            differences = " and ".join(f"{np.diff(means.mean(axis)).item():+.2f}" for axis in (1, 0))
            parts.append(f"{TITLES[arm]} {PANELS[metric].split(',')[0]} {differences}")
    return f"{EFFECTS} (weak minus strong) and the families (Qwen2.5-VL minus Qwen3-VL), {'; '.join(parts)}."


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws a row of panels for each arm, with a line for each seed."""
    with matplotlib.rc_context(STYLE | {"font.size": 8, "savefig.dpi": 110}):
        figure, panels = plt.subplots(len(ARMS), len(PANELS), figsize=(9, 4.8), sharex=True, layout="constrained")
        for (arm, (metric, title)), axes in zip(product(ARMS, PANELS.items()), panels.flat, strict=True):
            for prior, family in product(PRIORS, FAMILIES):
                _draw_lines(axes, curves(rows, Policy(family, prior), arm, metric), prior, family)
            axes.set_title(f"{TITLES[arm]}: {title}", fontsize=8)
            axes.set_ylim(-0.03, None if metric == "kappa" else 1.03)
        for axes in panels[-1]:
            axes.set_xlabel("step of RL", fontsize=8)
        handles, _ = panels[0, 0].get_legend_handles_labels()
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), handlelength=3, handletextpad=0.5
        )
        with whole_file(path) as file:
            figure.savefig(file, format="png")
        plt.close(figure)


def _draw_lines(axes: Axes, seeds: Float[np.ndarray, "seeds steps"], prior: str, family: str) -> None:
    title, dashes = FAMILIES[family]
    for number, values in enumerate(seeds):
        smooth, label = running_mean(values, SMOOTHED_STEPS), "" if number else f"{prior} prior, {title}"
        axes.plot(np.arange(1, len(smooth) + 1), smooth, dashes, color=PRIORS[prior], lw=1.2, label=label)


def with_results(page: str, rows: Sequence[Row]) -> str:
    page = with_table(page, "prior, family", table(rows))
    return re.sub(rf"^{EFFECTS} .*$", lambda _: effects(rows), page, flags=re.M)


def main() -> None:
    rows = read_rows(MEASURED)
    rewrite("scripts.miniature.contrast_page", FIGURE, partial(draw, rows), lambda page: with_results(page, rows), PAGE)


if __name__ == "__main__":
    run_cli(main)
