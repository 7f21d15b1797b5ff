"""Imports the texts of the published release: `python -m paravt_jax.prompts import-release DIR --dst FILE.yaml`.

DIR is your copy of the released repository, whose files are parsed but never executed. Without --mode, FILE.yaml gets
all texts of the released evaluation, for eval.release_texts. With --mode, it gets one mode's prompts for
rollout.prompts_file, so that a published policy gets its own prompts in this project's dialogues:

  --mode agentic_general    the published policy, in the paper's tables
  --mode agentic_minimal    the same policy, on temporal grounding
  --mode reasoning, direct  without a tool
  --mode training           the sub-agents' text in its training; all other messages come from the data rows

DIFFERS: with --mode, the video is named `video.mp4`; the release uses the file's own name.
"""

import argparse
import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from model_port.cli import add_debug_flag, prog_of, run_cli
from paravt_jax.config import SINGLE_TURN_MODES
from paravt_jax.evaluation.release.source import COMMIT, DRIVER, LOADERS, check_commit, escaped, parsed, read_release
from paravt_jax.evaluation.release.texts import OWN_TEXTS
from paravt_jax.run.output_file import OutputFile
from rollout.prompts import placeholder_problem

TRAINING, SUBAGENT_FILE = "training", "paravt/rl/subagents/crop_video/cropped_video.py"
BUILD_PROMPT, PROMPT = "build_prompt", "prompt"  # function and variable with the sub-agents' text
WINDOW = {"start_str": "{start}", "end_str": "{end}", "duration": "{duration_s:.1f}"}  # its values -> placeholders
ROLLOUT_MODES = ("agentic_general", "agentic_minimal", *SINGLE_TURN_MODES, TRAINING)
OWN_MODES = tuple(name.removeprefix("system.") for name in OWN_TEXTS)


def import_release(directory: Path, own: Mapping[str, Path] | None = None) -> dict[str, str]:
    """Reads all texts of the release's evaluation; `own` has files with system texts that it lacks, by mode."""
    if directory.is_file():
        raise ValueError(f"{directory} is a file; give the directory of the released repository, commit {COMMIT}")
    texts = read_release(directory)
    check_commit(directory, texts)
    return texts | {f"system.{mode}": file.read_text() for mode, file in (own or {}).items()}


def rollout_prompts(texts: Mapping[str, str], mode: str) -> dict[str, Any]:
    """The prompts of a mode, with the keys of rollout.prompts."""
    system = escaped(texts[f"system.{mode}"])
    if mode in SINGLE_TURN_MODES:
        prompts = {"system": system, "overview": "", "without_tool": "{question}"}
    else:
        named = texts["file_name"].replace("{name}", "{names}")
        prompts = {"system": system, "system_has_tools": True, "overview": "", "with_tool": named}
    for name, value in prompts.items():
        if problem := placeholder_problem(name, value):
            raise ValueError(f"--mode {mode}: {problem}")
    return prompts


def training_prompts(directory: Path) -> dict[str, Any]:
    """The prompts of training: messages from data rows; sub-agents get frames without times, then their text."""
    return {
        "row_messages": True,
        "overview": "",
        "with_tool": "{question}",
        "without_tool": "{question}",
        "subagent_system": "",
        "subagent_intro": "",
        "subagent_instruction": _subagent_text(directory / SUBAGENT_FILE),
        "last_turn": "",
    }


def _subagent_text(path: Path) -> str:
    for function in ast.walk(parsed(path)):
        for node in ast.walk(function) if getattr(function, "name", "") == BUILD_PROMPT else ():
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.JoinedStr(values=parts)) if name == PROMPT:
                    return "".join(_window_text(path, part) for part in parts)
    raise ValueError(
        f"{path} has no f-string {PROMPT} in {BUILD_PROMPT}; give the released repository, commit {COMMIT}"
    )


def _window_text(path: Path, part: ast.expr) -> str:
    match part:
        case ast.Constant(value=text):
            return escaped(str(text))
        case ast.FormattedValue(value=ast.Name(id=name)) if name in WINDOW:
            return WINDOW[name]
    value = ast.unparse(part.value if isinstance(part, ast.FormattedValue) else part)[:60]
    raise ValueError(f"{path}: the sub-agent's text has the value {value!r}, expected {', '.join(WINDOW)}")


def _content(directory: Path, own: Mapping[str, Path], mode: str | None) -> Mapping[str, Any]:
    if mode == TRAINING:
        return training_prompts(directory)
    texts = import_release(directory, own)
    return rollout_prompts(texts, mode) if mode else texts


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as literal blocks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(texts: Mapping[str, Any], comment: str) -> str:
    dumped = yaml.dump(dict(texts), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return f"# {comment}\n{dumped}"


def own_texts(values: Sequence[str]) -> dict[str, Path]:
    """Parses --text MODE=FILE arguments."""
    files: dict[str, Path] = {}
    for value in values:
        mode, separator, file = value.partition("=")
        if mode not in OWN_MODES or not separator:
            raise ValueError(f"--text {value} is not MODE=FILE with a MODE of {', '.join(OWN_MODES)}")
        if not Path(file).is_file():
            raise ValueError(f"--text {value}: {file} does not exist")
        files[mode] = Path(file)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.prompts"), description="Write a file for eval.release_texts or rollout.prompts_file."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    release = commands.add_parser(
        "import-release", help="from a copy of the released repository, which is parsed and never run"
    )
    release.add_argument("directory", type=Path, metavar="DIR", help=f"the released repository, commit {COMMIT}")
    release.add_argument(
        "--mode", choices=ROLLOUT_MODES, help="write the prompts of this mode, for rollout.prompts_file, not all texts"
    )
    release.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="MODE=FILE",
        help=f"your file with the system text of a mode that the release does not include: {', '.join(OWN_MODES)}",
    )
    release.add_argument("--dst", type=Path, metavar="OUT.yaml", help="output file (default: print to stdout)")
    release.add_argument("--force", action="store_true", help="replace OUT.yaml even if another command wrote it")
    add_debug_flag(parser)
    add_debug_flag(release)
    args = parser.parse_args()
    own = own_texts(args.text)
    command = f"prompts import-release{f' --mode {args.mode}' if args.mode else ''}"
    inputs = [*(args.directory / name for name in (DRIVER, LOADERS, SUBAGENT_FILE)), *own.values()]
    written = args.dst and OutputFile(args.dst, command, inputs=inputs, force=args.force)
    key = "rollout.prompts_file" if args.mode else "eval.release_texts"
    content = _content(args.directory, own, args.mode)
    text = to_yaml(content, f"{args.mode or 'All texts'} of the ParaVT release, commit {COMMIT}, for {key}")
    if written is None:
        print(text, end="")
        return
    written.write(text)
    print(f"{args.dst}: use it with {key}={args.dst}")


if __name__ == "__main__":
    run_cli(main)
