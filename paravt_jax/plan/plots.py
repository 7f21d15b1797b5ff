"""The sweep over splits of devices as one picture."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
        figure.savefig(path)


def _seconds(axes: Axes, plan: RolloutPlan) -> None:
    places, bottom = range(len(plan.splits)), [0.0] * len(plan.splits)
    for name, (label, colour) in PARTS.items():
        heights = [getattr(split.times, name) for split in plan.splits]
        axes.bar(places, heights, BAR_WIDTH, bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, split, top in zip(places, plan.splits, bottom, strict=True):
        best = split == plan.best
        axes.annotate(
            f"{split.times.step_s:.1f}",
            (place, top),
            (0, 4),
            textcoords="offset points",
            ha="center",
            color=INK if best else FAINT,
            weight="bold" if best else "normal",
        )
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
