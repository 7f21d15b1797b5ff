"""The configs that come with the package, by file or name."""

from difflib import get_close_matches
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / "configs"  # in a clone, a link to configs/


def recipes() -> dict[str, Path]:
    files = sorted(DIRECTORY.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {str(file.relative_to(DIRECTORY).with_suffix("")): file for file in files}


def config_file(path: str | Path) -> Path:
    """Finds a config: an existing file, or one of the package by name or as `configs/NAME.yaml`."""
    if Path(path).exists() and not Path(path).is_dir():
        return Path(path)
    name, files = str(path).removeprefix("configs/").removesuffix(".yaml"), recipes()
    if name in files:
        return files[name]
    close = get_close_matches(name, files, 1)
    hint = f"did you mean {close[0]}?" if close else "`paravt configs` lists the names"
    raise FileNotFoundError(f"{path} is neither a file nor a config of the package ({hint})")


def config_directory(path: Path) -> Path:
    """Finds a directory of configs: an existing one, or one of the package such as `configs/reproduce`."""
    own = DIRECTORY / str(path).removeprefix("configs/")
    return own if own.is_dir() and not path.exists() else path
