"""Trains a policy on traces: supervised fine-tuning (SFT), the cold start before RL.

python -m paravt_jax.sft --config configs/sft_8b.yaml [a.b=c …]

From Python, call `paravt_jax.sft(config)`.
"""

import sys
from typing import TYPE_CHECKING

from model_port.cli import run_cli
from paravt_jax.config import SftConfig
from paravt_jax.run.command import add_changes_flag, add_plan_flags, config_parser, make_callable, read_config
from paravt_jax.run.hosts import ALONE, Hosts, joined
from paravt_jax.run.process import claim_resources, run_here

if TYPE_CHECKING:
    from paravt_jax.imitation.run import SftRun


async def sft(config: SftConfig, *, allow_changes: bool = False, hosts: Hosts = ALONE) -> "SftRun":
    """Trains until the last step or a stop signal."""
    from paravt_jax.imitation.run import open_sft_run  # imported late, so that --help does not load jax

    async with open_sft_run(config, allow_changes=allow_changes, hosts=hosts) as run:
        await run.validate_if_due()
        while (batch := await run.next_batch()) is not None:
            metrics = await run.imitate(batch)
            run.record(batch, metrics)
            await run.validate_if_due()
            await run.save_if_due()
    return run


def run_sft(config: SftConfig, *, allow_changes: bool = False) -> "SftRun":
    """Runs the command from Python and returns the closed run. It also works in a notebook's running event loop."""
    from paravt_jax.run.compiles import set_up_compilation

    claim_resources()
    set_up_compilation()
    with joined(config.hosts) as hosts:
        return run_here(sft(config, allow_changes=allow_changes, hosts=hosts))


make_callable(__name__, run_sft, SftConfig)


def main() -> None:
    parser = config_parser(
        "paravt_jax.sft", "Train a policy on traces. Re-running with the same run_dir resumes the run."
    )
    add_plan_flags(parser)
    add_changes_flag(parser)
    args = parser.parse_intermixed_args()
    config = read_config(parser, args, SftConfig, "configs/sft_8b.yaml is an example", "data.train=FILE")
    if config is None:
        return
    if args.plan:
        from paravt_jax.plan.tables import plan_of

        print(plan_of(config, args.device))
        return
    run = run_sft(config, allow_changes=args.allow_changes)
    if run.training.exit_code:
        sys.exit(run.training.exit_code)


if __name__ == "__main__":
    run_cli(main)
