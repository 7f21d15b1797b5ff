"""The command line of all commands that run a config: reads, overrides and prints settings.

Commands import jax only after reading the settings, so that --help and invalid settings fail fast.
"""

import argparse
import inspect
import json
import reprlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from omegaconf import OmegaConf

from model_port.cli import add_debug_flag, prog_of
from paravt_jax.config import WRITTEN, Config, EvalConfig, SftConfig, as_written, load_config
from paravt_jax.config.keys import helps_of

Settings = TypeVar("Settings", Config, SftConfig, EvalConfig)
COMMENT_COLUMN, LAST_COLUMN = 40, 120
PLANNED_DEVICE = "h100"


class _CallableModule(ModuleType):
    """A module that can be called like a function."""

    called: Callable[..., Any]
    schema: type[Any]

    def __call__(self, config: Any, **options: Any) -> Any:
        if not isinstance(config, self.schema):
            arguments = "FILE" if self.schema is Config else f"FILE, schema={self.schema.__name__}"
            need = f"{self.__name__} needs load_config({arguments}) of paravt_jax.config"
            raise TypeError(f"{need}, got {reprlib.repr(config)}")
        return self.called(config, **options)


def make_callable(name: str, function: Callable[..., Any], schema: type[Any]) -> None:
    """Makes a module callable, so that `paravt_jax.train(config)` does the same as `python -m paravt_jax.train`."""
    module = sys.modules[name]
    module.__class__ = _CallableModule
    vars(module).update(called=function, schema=schema, __signature__=inspect.signature(function))


class _ConfigParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "; settings have no dashes, for example seed=1" * message.startswith("unrecognized arguments")
        super().error(message + hint)


def config_parser(module: str, description: str) -> argparse.ArgumentParser:
    parser = _ConfigParser(
        prog=prog_of(module),
        description=description,
        epilog="Every setting with its default: --show without a config. `paravt configs` lists the package's configs.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file, or a name of `paravt configs`; settings that it omits have their defaults",
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings, which override the file's")
    parser.add_argument("--show", action="store_true", help="print all settings and exit")
    add_debug_flag(parser)
    return parser


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", action="store_true", help="print memory, tokens and time per step, and exit")
    parser.add_argument("--device", help=f"for --plan: the accelerator (default {PLANNED_DEVICE})")


def add_changes_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-changes", action="store_true", help="resume with another model, seed or data than before"
    )


def read_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, schema: type[Settings], example: str, *needed: str
) -> Settings | None:
    """Reads the settings; None if --show only prints them. Without a file, `needed` overrides required settings."""
    if "plan" in args:
        if not args.plan and args.device is not None:
            parser.error("--device needs --plan")
        if args.plan and args.device is None:
            print(f"planned for {PLANNED_DEVICE}, the default of --device; a recipe's header names its accelerator\n")
        args.device = args.device or PLANNED_DEVICE
    if args.config is None and not args.show:
        file = next((argument for argument in args.overrides if "=" not in argument), None)
        parser.error(f"--config FILE is needed; {f'write it as --config {file}' if file else example}")
    config = load_config(args.config, *(() if args.config else needed), *args.overrides, schema=schema)
    if args.show:
        print("\n".join(config_lines(config)))
        return None
    return config


def config_lines(section: Any, indent: str = "", written: Any = None) -> Iterator[str]:
    """Yields the lines of a YAML config with comments. Values `written` as ${…} stay unresolved."""
    comments = helps_of(type(section))
    written = getattr(section, WRITTEN, {}) if written is None else written
    for field in fields(section):
        value, comment = getattr(section, field.name), comments[field.name]
        if not indent and (value is None or is_dataclass(value)):
            yield ""
        if is_dataclass(value):
            yield from _commented([f"{indent}{field.name}:"], comment or _docstring(type(value)))
            yield from config_lines(value, f"{indent}  ", written.get(field.name) or {})
        else:
            lines = _yaml(field.name, as_written(value, written.get(field.name))).splitlines()
            yield from _commented([indent + line for line in lines], comment)


def _docstring(section: type) -> str:
    """A class's own docstring, without the one that dataclasses generate."""
    text = section.__doc__ or ""
    return "" if text.startswith(f"{section.__name__}(") else " ".join(text.split())


def _yaml(name: str, value: Any) -> str:
    if isinstance(value, list) or "\n" in str(value):
        return f"{name}: {json.dumps(value, ensure_ascii=False)}"  # JSON is valid YAML, on one line
    return OmegaConf.to_yaml(OmegaConf.create({name: value}))


def _commented(lines: list[str], comment: str) -> Iterator[str]:
    """Puts the comment next to the line and wraps it below, or puts it above if it does not fit."""
    beside = len(lines) == 1 and len(lines[0]) < COMMENT_COLUMN
    column = COMMENT_COLUMN if beside else len(lines[0]) - len(lines[0].lstrip())
    wrapped = textwrap.wrap(f"# {comment}", LAST_COLUMN - column, subsequent_indent="# ") if comment else []
    comments = [" " * column + line for line in wrapped]
    if comments and beside:
        yield lines[0] + comments[0][len(lines[0]) :]
        yield from comments[1:]
    else:
        yield from [*comments, *lines]
