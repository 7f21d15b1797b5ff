"""A plan as one picture: the sweep over splits of devices, and a cold start by its rows."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paravt_jax.plan.imitation import ImitationPlan
from paravt_jax.plan.rollouts import DeviceSplit, RolloutPlan
from paravt_jax.run.plots import BLUE, FAINT, GREEN, INK, ORANGE, PINK, STYLE

PARTS = {"rollout_s": ("waits for rollouts", BLUE), "update_s": ("update", ORANGE), "publish_s": ("publish", PINK)}
BAR_WIDTH = 0.7
MOST_BARS_INCHES = 14.0


def draw_splits(plan: RolloutPlan, title: str, path: Path) -> None:
    """Seconds of a step by what the learner does in them, and how idle learner and servers are."""
    width = min(MOST_BARS_INCHES, 6.0 + 0.9 * len(plan.splits))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 6.2))
        figure.suptitle(f"{title}, simulated", x=0.01, ha="left", fontsize=14, weight="bold")
        seconds, idle = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        _seconds(seconds, plan)
        _idle(idle, plan)
        figure.savefig(path, format="png")


def draw_imitation(plan: ImitationPlan, title: str, path: Path) -> None:
    """Seconds of a step by its rows, and memory by those of a batch; the config's own in bold."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 6.2))
        figure.suptitle(f"{title}, estimated", x=0.01, ha="left", fontsize=14, weight="bold")
        seconds, memory = figure.subplots(2, 1)
        by_rows = {step.num_rows: step.seconds or 0.0 for step in plan.steps}
        _bars(seconds, by_rows, plan.config.sft.rows_per_step, ORANGE)
        seconds.set_title("seconds of a step, without decoding, by sft.rows_per_step")
        gib = {num_rows: num_bytes / 2**30 for num_rows, num_bytes in plan.peaks}
        _bars(memory, gib, plan.config.pack.num_rows, BLUE)
        memory.axhline(plan.device.usable_bytes / 2**30, color=PINK, linewidth=2, label="usable")
        memory.set_title("GiB of a device by pack.num_rows")
        memory.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, format="png")


def _bars(axes: Axes, heights: dict[int, float], own: int, colour: str) -> None:
    places = range(len(heights))
    axes.bar(places, list(heights.values()), BAR_WIDTH, color=colour)
    for place, (num_rows, height) in zip(places, heights.items(), strict=True):
        _over(axes, place, height, height, bold=num_rows == own)
    axes.set_xticks(places, list(map(str, heights)))
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.15)


def _over(axes: Axes, place: int, height: float, number: float, *, bold: bool) -> None:
    axes.annotate(
        f"{number:.1f}",
        (place, height),
        (0, 4),
        textcoords="offset points",
        ha="center",
        color=INK if bold else FAINT,
        weight="bold" if bold else "normal",
    )


def _seconds(axes: Axes, plan: RolloutPlan) -> None:
    places, bottom = range(len(plan.splits)), [0.0] * len(plan.splits)
    for name, (label, colour) in PARTS.items():
        heights = [getattr(split.times, name) for split in plan.splits]
        axes.bar(places, heights, BAR_WIDTH, bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, split, top in zip(places, plan.splits, bottom, strict=True):
        _over(axes, place, top, split.times.step_s, bold=split == plan.best)
    axes.set_title("seconds of a step")
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _idle(axes: Axes, plan: RolloutPlan) -> None:
    places = range(len(plan.splits))
    learner = [split.learner_idle_frac for split in plan.splits]
    servers = [1 - split.times.busy_frac for split in plan.splits]
    axes.plot(places, learner, "o-", color=ORANGE, linewidth=2, label="learner")
    axes.plot(places, servers, "o-", color=GREEN, linewidth=2, label="servers")
    axes.set_title("idle, part of the time")
    axes.set_ylim(0, 1)
    axes.set_xticks(places, [_label(split, plan) for split in plan.splits])
    axes.set_xlabel("devices of the learner (data x fsdp x tensor) + servers")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _label(split: DeviceSplit, plan: RolloutPlan) -> str:
    mesh = split.mesh
    servers = f"{split.num_servers}" + f" of {split.server_devices}" * (split.server_devices > 1)
    config = "\nconfig" if split == plan.now else ""
    return f"{mesh.num_devices} ({mesh.data}x{mesh.fsdp}x{mesh.tensor})\n+ {servers}{config}"
