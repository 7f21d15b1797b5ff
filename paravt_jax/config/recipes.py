"""Lists or copies the configs that come with the package: paravt configs [NAME … --to DIR]

Commands accept a name instead of a file: `--config paragrpo_8b`, `--config contrast/qwen25vl_7b_sft`.
"""

import argparse
from pathlib import Path

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import check_local, named
from paravt_jax.config.shipped import config_file, recipes


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.config.recipes"),
        description="List the configs that come with the package, or copy some. train, sft, eval and bench mesh take "
        "such a name as --config NAME; launch/ has files for clusters.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="configs to copy (default: list all)")
    parser.add_argument("--to", type=Path, default=Path(), metavar="DIR", help="directory of the copies (default .)")
    add_debug_flag(parser)
    args = parser.parse_args()
    check_local(args.to)
    if args.to.exists() and not args.to.is_dir():
        raise ValueError(f"--to {args.to} is not a directory")
    if not args.names:
        print("\n".join(f"{name:<36}  {_title(file)}" for name, file in recipes().items()))
    for name in args.names:
        source = config_file(name)
        copy = args.to / source.name
        if copy.exists():
            raise ValueError(f"{copy} exists; choose another --to, or remove it")
        args.to.mkdir(parents=True, exist_ok=True)
        try:
            with named(copy):
                copy.write_bytes(source.read_bytes())
        except OSError:  # a full disk
            copy.unlink(missing_ok=True)
            raise
        print(copy)


def _title(file: Path) -> str:
    return file.read_text().partition("\n")[0].removeprefix("# ")


if __name__ == "__main__":
    run_cli(main)
