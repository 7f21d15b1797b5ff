"""What the commands that run a config have in common: where its settings come from, and how they are shown.

Until the settings are read no command loads jax, so that help and what is wrong with a setting come at once.
"""

import argparse
from typing import TypeVar

from model_port.cli import add_debug_flag
from paravt_jax.config import Config, EvalConfig, SftConfig, load_config, to_yaml

Settings = TypeVar("Settings", Config, SftConfig, EvalConfig)


def config_parser(module: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog="Every setting with its default: --show without a config. Examples are in configs/.",
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file; what it leaves out has its default")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings, after those of the file")
    parser.add_argument("--show", action="store_true", help="print all settings as they would be used, and exit")
    add_debug_flag(parser)
    return parser


def read_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, schema: type[Settings], example: str, *needed: str
) -> Settings | None:
    """The settings, or None when they were only to be shown. `needed` stand in for those without a default there."""
    if args.config is None and not args.show:
        parser.error(f"--config FILE is needed; {example}")
    config = load_config(args.config, *(() if args.config else needed), *args.overrides, schema=schema)
    if args.show:
        print(to_yaml(config), end="")
        return None
    return config
