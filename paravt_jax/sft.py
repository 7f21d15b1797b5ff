"""The cold start: imitation of traces, the loop.

python -m paravt_jax.sft --config configs/sft_8b.yaml [a.b=c …]
"""

import argparse
import asyncio

from model_port.cli import add_debug_flag, run_cli
from paravt_jax.config import SftConfig, load_config, to_yaml
from paravt_jax.process import use_compilation_cache
from paravt_jax.sft_run import opened


async def sft(config: SftConfig) -> None:
    """Trains a run to its end, or until it is told to stop."""
    async with opened(config) as run:
        while (lesson := await run.next_lesson()) is not None:
            metrics = await run.imitate(lesson)
            run.record(lesson, metrics)
            await run.validate_if_due()
            await run.save_if_due()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paravt_jax.sft",
        description="Trains a policy on traces. Started again with the same run_dir, a run goes on where it was.",
        epilog="Every setting with its default: --show without a config. Examples are in configs/.",
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file; what it leaves out has its default")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings, after those of the file")
    parser.add_argument("--show", action="store_true", help="print all settings as they would be used, and exit")
    add_debug_flag(parser)
    args = parser.parse_args()
    if args.config is None and not args.show:
        parser.error("--config FILE is needed; configs/sft_8b.yaml is an example")
    config = load_config(args.config, *args.overrides, schema=SftConfig)
    if args.show:
        print(to_yaml(config), end="")
        return
    use_compilation_cache()
    asyncio.run(sft(config))


if __name__ == "__main__":
    run_cli(main)
