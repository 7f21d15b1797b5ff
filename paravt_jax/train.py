"""PARA-GRPO, the loop.

python -m paravt_jax.train --config configs/smoke_cpu.yaml [a.b=c …]
"""

import asyncio

from model_port.cli import run_cli
from paravt_jax.config import Config
from paravt_jax.run.command import add_changes_flag, config_parser, read_config


async def train(config: Config, *, allow_changes: bool = False) -> None:
    """Trains a run to its end, or until it is told to stop."""
    from paravt_jax.rl.opening import opened  # late: --help and wrong settings need not wait for jax

    async with opened(config, allow_changes=allow_changes) as run:
        while (groups := await run.collect()) is not None:
            metrics = await run.update(groups)
            publish_s = await run.publish()
            run.record(groups, metrics, publish_s)
            await run.validate_if_due()
            await run.save_if_due()


def main() -> None:
    parser = config_parser(
        "paravt_jax.train",
        "Trains a policy with PARA-GRPO. Started again with the same run_dir, a run goes on where it was.",
    )
    parser.add_argument("--plan", action="store_true", help="print memory, tokens and time per step, and exit")
    parser.add_argument("--device", default="h100", help="for --plan: the accelerator (default h100)")
    add_changes_flag(parser)
    args = parser.parse_intermixed_args()
    config = read_config(parser, args, Config, "configs/smoke_cpu.yaml runs anywhere")
    if config is None:
        return
    if args.plan:
        from paravt_jax.plan.tables import plan_of

        print(plan_of(config, args.device))
        return
    from paravt_jax.run.compiles import use_compilation_cache

    use_compilation_cache()
    asyncio.run(train(config, allow_changes=args.allow_changes))


if __name__ == "__main__":
    run_cli(main)
