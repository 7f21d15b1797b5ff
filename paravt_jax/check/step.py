"""Stage `step`: two short RL or SFT steps by the recipe on synthetic videos. Results are of the second.

The first step compiles most programs, so the second's times are closer to those of a run.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model_port.output_dir import GIB
from paravt_jax.check import spread
from paravt_jax.check.report import Facts, Measured
from paravt_jax.check.target import Target
from paravt_jax.config import Config, SftConfig, computed_on
from paravt_jax.plan.calibrate import device_rates
from paravt_jax.plan.devices import DEVICES, device_of
from paravt_jax.plan.remat import planned_memory
from paravt_jax.plan.run import PlannedRl, planned_run
from paravt_jax.run.compiles import set_up_compilation
from paravt_jax.run.log import EPISODES_DIR, METRICS_FILE, load_jsonl
from paravt_jax.run.process import claim_resources
from paravt_jax.sft import sft
from paravt_jax.train import train
from rollout.chat import Chat

NUM_STEPS, GROUP_SIZE, NEW_TOKENS = 2, 4, 64
PATIENT_S = 6 * 3600.0  # deadline of a turn, because a large model on a CPU is slow
RUN = "run"
SHOWN = (
    *("time/rollout_s", "time/update_s", "time/publish_s"),
    *("perf/sampled_tokens_per_s", "perf/trained_tokens_per_s_device", "perf/mfu"),
)


def step(target: Target) -> Iterator[Measured | Facts]:
    claim_resources()
    set_up_compilation()
    config = shortened(target, len(jax.devices()))
    device = device_of(jax.devices()[0].device_kind) or DEVICES["cpu"]
    planned = planned_memory(planned_run(computed_on(config, device.platform), target.config), device)
    yield {"planned_gib": planned.peak_bytes / GIB}
    run = asyncio.run(sft(config) if isinstance(config, SftConfig) else train(config))
    if code := run.training.exit_code:
        yield Measured("run", problem=f"it ended with exit code {code}")
        return
    run_dir = Path(config.run_dir)
    metrics = list(load_jsonl(run_dir / METRICS_FILE))[-1]
    yield from metric_lines(metrics, config)
    if isinstance(config, Config):
        yield {"rates": device_rates(PlannedRl.of(config, target.config), run_dir, device)}
        episodes = [row for path in sorted((run_dir / EPISODES_DIR).iterdir()) for row in load_jsonl(path)]
        yield decoded_line(episodes, target.chat)


def shortened(target: Target, num_devices: int) -> Config | SftConfig:
    """The recipe with few, short episodes or few traces of synthetic videos, on this machine's devices."""
    settings = [
        *(f"run_dir={target.file(RUN)}", f"model.path={target.hf_dir}", "data.train=synthetic", "data.validation="),
        *("log.wandb_project=", "hosts.coordinator=", "hosts.num=1"),
    ]
    mesh, rows = target.run_config.mesh, target.run_config.pack.num_rows
    if mesh.num_devices != num_devices:
        rows = num_devices * -(-rows // num_devices)
        settings += ["mesh.data=1", f"mesh.fsdp={num_devices}", "mesh.tensor=1", f"pack.num_rows={rows}"]
    if isinstance(target.run_config, SftConfig):
        settings += [f"sft.num_steps={NUM_STEPS}", f"sft.rows_per_step={rows}"]
    else:
        settings += [
            *(f"train.num_steps={NUM_STEPS}", "train.prompts_per_step=1", f"train.group_size={GROUP_SIZE}"),
            *("train.max_resamples=0", "train.updates_per_step=1", "train.max_staleness=0", "train.oversample=0"),
            f"rollout.turn_deadline_s={PATIENT_S:g}",
            *(f"rollout.max_new_tokens={NEW_TOKENS}", f"reward.plugin={spread.__file__}:reward"),
            *("reward.oe_mode=exact", "judge.url=", "judge.model=", "engine.gpus=[]"),
            *(f"engine.kind={'sglang' if target.server else 'jax'}", f"engine.urls=[{target.server}]"),
        ]
    return target.with_settings(*settings)


def metric_lines(metrics: Mapping[str, float], config: Config | SftConfig) -> Iterator[Measured]:
    trained = metrics.get("perf/num_batches", 0)
    yield Measured("updates", f"{trained:g} in the last step", problem="" if trained else "no group had a signal")
    if isinstance(config, SftConfig):
        loss = metrics["loss/imitation"]
        yield Measured("loss of the traces, nats", loss, problem="" if math.isfinite(loss) else f"it is {loss}")
    else:
        kl = metrics.get("mismatch/behavior_kl", math.nan)
        yield Measured("behavior KL, sampler to learner", kl, config.mismatch.warn_kl)
    yield from (Measured(name, metrics[name]) for name in SHOWN if name in metrics)


def decoded_line(episodes: Sequence[Mapping[str, Any]], chat: Chat) -> Measured:
    """Checks that decoding the logged token ids gives the logged texts."""
    turns = other = 0
    for episode in episodes:
        ids = np.concatenate([segment["ids"] for segment in episode["segments"]])
        for turn in episode["turns"]:
            text = chat.decode(chat.without_stop(ids[slice(*turn["token_span"])]))
            turns += 1
            other += text != turn["text"]
    missing = sum(episode["missing"] for episode in episodes)
    problem = f"{other} differ, {missing} episodes are missing" if other or missing or not turns else ""
    return Measured("ids of turns decode to their texts", f"{turns} turns", problem=problem)
