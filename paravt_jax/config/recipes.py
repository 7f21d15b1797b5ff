"""Lists the configs that come with the package, and copies them:   paravt configs [NAME … --to DIR]

Every command takes a name in place of a file: `--config paragrpo_8b`, `--config contrast/qwen25vl_7b_sft`.
"""

import argparse
from difflib import get_close_matches
from pathlib import Path

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.output_dir import check_local

DIRECTORY = Path(__file__).parents[1] / "configs"  # in a clone, a link to configs/


def recipes() -> dict[str, Path]:
    files = sorted(DIRECTORY.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {str(file.relative_to(DIRECTORY).with_suffix("")): file for file in files}


def config_file(path: str | Path) -> Path:
    """The file itself, or the package's config by name or as `configs/NAME.yaml`."""
    if Path(path).exists():
        return Path(path)
    name, files = str(path).removeprefix("configs/").removesuffix(".yaml"), recipes()
    if name in files:
        return files[name]
    close = get_close_matches(name, files, 1)
    hint = f"did you mean {close[0]}?" if close else "`paravt configs` lists the names"
    raise FileNotFoundError(f"{path} is neither a file nor a config of the package ({hint})")


def config_directory(path: Path) -> Path:
    """The directory itself, or the package's, such as `reproduce` or `configs/reproduce`."""
    own = DIRECTORY / str(path).removeprefix("configs/")
    return own if own.is_dir() and not path.exists() else path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.config.recipes"),
        description="List the configs that come with the package, or copy some. Every command takes such a name as "
        "--config NAME.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="configs to copy (default: list all)")
    parser.add_argument("--to", type=Path, default=Path(), metavar="DIR", help="directory of the copies (default .)")
    add_debug_flag(parser)
    args = parser.parse_args()
    check_local(args.to)
    if not args.names:
        print("\n".join(f"{name:<36}  {_title(file)}" for name, file in recipes().items()))
    for name in args.names:
        source = config_file(name)
        copy = args.to / source.name
        if copy.exists():
            raise ValueError(f"{copy} exists; choose another --to, or remove it")
        args.to.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
        print(copy)


def _title(file: Path) -> str:
    return file.read_text().partition("\n")[0].removeprefix("# ")


if __name__ == "__main__":
    run_cli(main)
