"""PARA-GRPO, the loop.

python -m paravt_jax.train --config configs/smoke_cpu.yaml [a.b=c …]
"""

import argparse
import asyncio

from model_port.cli import add_debug_flag, run_cli
from paravt_jax.config import Config, load_config, to_yaml
from paravt_jax.opening import opened
from paravt_jax.process import use_compilation_cache


async def train(config: Config) -> None:
    """Trains a run to its end, or until it is told to stop."""
    async with opened(config) as run:
        while (groups := await run.collect()) is not None:
            metrics = await run.update(groups)
            publish_s = await run.publish()
            run.record(groups, metrics, publish_s)
            await run.validate_if_due()
            await run.save_if_due()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paravt_jax.train",
        description="Trains a policy with PARA-GRPO. Started again with the same run_dir, a run goes on where it was.",
        epilog="Every setting with its default: --show without a config. Examples are in configs/.",
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file; what it leaves out has its default")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings, after those of the file")
    parser.add_argument("--show", action="store_true", help="print all settings as they would be used, and exit")
    parser.add_argument("--plan", action="store_true", help="print memory, tokens and time per step, and exit")
    parser.add_argument("--device", default="h100", help="for --plan: the accelerator (default h100)")
    add_debug_flag(parser)
    args = parser.parse_args()
    if args.config is None and not args.show:
        parser.error("--config FILE is needed; configs/smoke_cpu.yaml runs anywhere")
    config = load_config(args.config, *args.overrides)
    if args.show:
        print(to_yaml(config), end="")
        return
    if args.plan:
        from paravt_jax.plan import plan_of

        print(plan_of(config, args.device))
        return
    use_compilation_cache()
    asyncio.run(train(config))


if __name__ == "__main__":
    run_cli(main)
