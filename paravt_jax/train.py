"""Trains a policy with PARA-GRPO.

python -m paravt_jax.train --config configs/smoke_cpu.yaml [a.b=c …]
python -m paravt_jax.train --replay RUN_DIR [a.b=c …]

From Python, call `paravt_jax.train(config)`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from model_port.cli import run_cli
from paravt_jax.config import Config
from paravt_jax.run.command import add_changes_flag, add_plan_flags, config_parser, make_callable, read_config
from paravt_jax.run.directory import SETTINGS_FILE
from paravt_jax.run.hosts import ALONE, Hosts, joined
from paravt_jax.run.process import claim_resources, run_here

if TYPE_CHECKING:
    from paravt_jax.rl.run import Run


async def train(
    config: Config,
    *,
    replay: Path | None = None,
    allow_changes: bool = False,
    take_over: bool = False,
    hosts: Hosts = ALONE,
) -> "Run":
    """Trains until the last step or a stop signal. With `replay`, trains on the episodes logged in that run."""
    from paravt_jax.rl.setup import open_run  # imported late, so that --help does not load jax

    async with open_run(config, replay=replay, allow_changes=allow_changes, take_over=take_over, hosts=hosts) as run:
        await run.validate_if_due()
        while (groups := await run.collect()) is not None:
            metrics = await run.update(groups)
            publish_s = await run.publish()
            run.record(groups, metrics, publish_s)
            await run.validate_if_due()
            await run.save_if_due()
    return run


def run_training(
    config: Config, *, replay: Path | str | None = None, allow_changes: bool = False, take_over: bool = False
) -> "Run":
    """Runs the command from Python and returns the closed run. It also works in a notebook's running event loop."""
    from paravt_jax.run.compiles import set_up_compilation

    claim_resources()
    set_up_compilation()
    with joined(config.hosts) as hosts:
        replay_dir = None if replay is None else Path(replay)
        options = {"replay": replay_dir, "allow_changes": allow_changes, "take_over": take_over}
        return run_here(train(config, **options, hosts=hosts))


make_callable(__name__, run_training, Config)


def main() -> None:
    parser = config_parser(
        "paravt_jax.train",
        "Train a policy with PARA-GRPO. Re-running with the same run_dir resumes the run.",
    )
    add_plan_flags(parser)
    add_changes_flag(parser)
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take over the servers of engine.urls from another run, even a live one; that run then ends",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="RUN_DIR",
        help="train on the logged episodes of this run, without an engine, and report steps with different metrics. "
        "Without --config, the settings are those of RUN_DIR with run_dir=RUN_DIR/replay; change loss, advantage, "
        "reward, optim and so on with a.b=c",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN_DIR",
        help="for --plan: use the rates measured in this run's log, or in the JSON of `paravt check`, instead of "
        "published ones",
    )
    args = parser.parse_intermixed_args()
    if args.calibrate is not None and not args.plan:
        parser.error("--calibrate needs --plan")
    if args.replay is not None and not (args.replay / SETTINGS_FILE).is_file():
        raise ValueError(f"--replay {args.replay}: it has no {SETTINGS_FILE}; give the run_dir of train")
    if args.replay is not None and args.config is None:
        args.config = args.replay / SETTINGS_FILE
        args.overrides = [f"run_dir={args.replay / 'replay'}", *args.overrides]
    config = read_config(parser, args, Config, "configs/smoke_cpu.yaml runs anywhere")
    if config is None:
        return
    if args.take_over and (args.replay is not None or not config.engine.connects):
        parser.error("--take-over needs running servers; set engine.urls, or leave it out")
    if args.plan:
        from paravt_jax.plan.tables import plan_of

        print(plan_of(config, args.device, args.calibrate))
        return
    run = run_training(config, replay=args.replay, allow_changes=args.allow_changes, take_over=args.take_over)
    if run.training.exit_code:
        sys.exit(run.training.exit_code)


if __name__ == "__main__":
    run_cli(main)
