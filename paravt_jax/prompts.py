"""Imports prompts: `python -m paravt_jax.prompts import-release FILE` reads those in the published release.

The release has its prompts in `paravt/eval/driver.py`, as string constants:

  GENERAL_AGENTIC_SYSTEM    --mode agentic_general: the published policy, in its tables
  MINIMAL_AGENTIC_SYSTEM    --mode agentic_minimal: the same policy, on temporal grounding
  REASONING_SYSTEM          --mode reasoning: without a tool
  DIRECT_SYSTEM             --mode direct: without a tool
  TOOL_SCHEMA               replaces {tool_schema} in the first two
  q_text = f"{q_text} …"    text after the question if there is a tool: the name of the video

The file is parsed but never executed, so only literals and strings built from them can be read. Two kinds of prompts
are not imported: the sub-agent's, which are in another file and have times as MM:SS, and those that force a last
answer, which depend on the data set. DIFFERS: the video's name is ours, `video.mp4`; the release uses its file name.
"""

import argparse
import ast
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from model_port.cli import add_debug_flag, prog_of, run_cli
from rollout.output_file import OutputFile
from rollout.prompts import placeholder_problem

SYSTEMS = {  # --mode: name of the constant
    "agentic_general": "GENERAL_AGENTIC_SYSTEM",
    "agentic_minimal": "MINIMAL_AGENTIC_SYSTEM",
    "reasoning": "REASONING_SYSTEM",
    "direct": "DIRECT_SYSTEM",
}
WITH_TOOL = ("agentic_general", "agentic_minimal")
SCHEMA = "TOOL_SCHEMA"
SCHEMA_PLACE = "{tool_schema}"
QUESTION = "q_text"
HOME, BESIDE = "paravt/eval/driver.py", "utils.py"
MAX_FILE_BYTES = 2**20
MAX_CHARS = 2**22  # limit for all strings built while reading a file


class Unreadable(ValueError):
    """An expression that only running the file could evaluate."""


class TooLong(Exception):
    """The strings exceed MAX_CHARS: a few lines that double a string would otherwise exhaust memory."""


@dataclass(frozen=True)
class Strings:
    """A module's string constants by name, and the reasons why others cannot be read."""

    texts: dict[str, str]
    unreadable: dict[str, str]


def import_release(path: Path, mode: str) -> dict[str, Any]:
    """The prompts of a mode, with the keys of rollout.prompts."""
    tree = _parsed(path)
    try:
        return _prompts_of(tree, path, mode)
    except TooLong:
        raise ValueError(
            f"{path} puts together texts of more than {MAX_CHARS} characters; give the release's {HOME}"
        ) from None


def _prompts_of(tree: ast.Module, path: Path, mode: str) -> dict[str, Any]:
    strings = strings_of(tree)
    driver = path.with_name(Path(HOME).name)
    if SYSTEMS[mode] not in strings.texts and path.name == BESIDE and driver.is_file():
        return import_release(driver, mode)
    prompts = _with_tool(tree, strings, path, mode) if mode in WITH_TOOL else _without_tool(strings, path, mode)
    for name, value in prompts.items():
        if problem := placeholder_problem(name, value):
            raise ValueError(f"{path}: of --mode {mode}, {problem}")
    return prompts


def _with_tool(tree: ast.Module, strings: Strings, path: Path, mode: str) -> dict[str, Any]:
    system = _text(SYSTEMS[mode], strings, path)
    if SCHEMA_PLACE in system:  # this constant is a template in the release, too
        schema = _doubled(_text(SCHEMA, strings, path))
        if len(system) + system.count(SCHEMA_PLACE) * len(schema) > MAX_CHARS:
            raise TooLong
        system = system.replace(SCHEMA_PLACE, schema)
    else:
        system = _doubled(system)
    prompts = {"system": system, "system_has_tools": True}
    called = next(_questions(tree), None)
    if called is None:  # keep our overview prompt, which names the video
        return prompts | {"with_tool": "{question}"}
    return prompts | {"overview": "", "with_tool": called}


def _without_tool(strings: Strings, path: Path, mode: str) -> dict[str, Any]:
    return {"system": _doubled(_text(SYSTEMS[mode], strings, path)), "overview": "", "without_tool": "{question}"}


def strings_of(tree: ast.Module) -> Strings:
    """Evaluates a module's assignments as far as possible without running them."""
    reader = _Reader(Strings({}, {}))
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and value is not None:
            reader.assign(target.id, value)
    return reader.found


class _Reader:
    """Evaluates assignments in order, and limits the total length of the strings that it builds."""

    def __init__(self, found: Strings):
        self.found = found
        self._chars_left = MAX_CHARS

    def assign(self, name: str, value: ast.expr) -> None:
        try:
            self.found.texts[name] = self._read(value)
        except (Unreadable, RecursionError) as problem:
            self.found.texts.pop(name, None)
            self.found.unreadable[name] = str(problem)

    def _read(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name) if name in self.found.texts:
                return self.found.texts[name]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined([left, right])
            case ast.JoinedStr(values=parts):
                return self._joined(parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._read(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="json"), attr="dumps"), args=[value], keywords=[]):
                return _dumped(value)
        shown = repr(ast.unparse(node)[:60])
        raise Unreadable(f"line {node.lineno}, {shown}, is no text that can be read without running it")

    def _joined(self, nodes: list[ast.expr]) -> str:
        parts = [self._read(node) for node in nodes]
        self._chars_left -= sum(map(len, parts))
        if self._chars_left < 0:
            raise TooLong
        return "".join(parts)


def _dumped(node: ast.expr) -> str:
    try:
        return json.dumps(ast.literal_eval(node))
    except (ValueError, TypeError, MemoryError):
        raise Unreadable(f"line {node.lineno} dumps something that is no literal") from None


def _questions(tree: ast.Module) -> Iterator[str]:
    """Finds assignments `q_text = f"{q_text}…{…}…"` and returns their text as a template for with_tool."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id=asked)), *parts]),
            ) if name == asked == QUESTION:
                yield "{question}" + "".join(_part(part) for part in parts)


def _part(node: ast.expr) -> str:
    return _doubled(str(node.value)) if isinstance(node, ast.Constant) else "{names}"


def _doubled(text: str) -> str:
    """Escapes braces for a template."""
    return text.replace("{", "{{").replace("}", "}}")


def _text(name: str, strings: Strings, path: Path) -> str:
    if name in strings.unreadable:
        raise ValueError(f"{path}: {name} cannot be read: {strings.unreadable[name]}")
    if name not in strings.texts:
        there_are = ", ".join(strings.texts) or "none"
        raise ValueError(
            f"{path} has no string constant {name}; the release has it in {HOME}. What there is: {there_are}"
        )
    return strings.texts[name]


def _parsed(path: Path) -> ast.Module:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; give the release's {HOME}")
    try:
        with warnings.catch_warnings(action="ignore"):  # about the style of the release's code
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        raise ValueError(f"{path} is no Python file: {problem}") from None


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as literal blocks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(prompts: dict[str, Any], said: str) -> str:
    dumped = yaml.dump(prompts, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return f"# {said}\n{dumped}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.prompts"), description="Makes a file for rollout.prompts_file."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    release = commands.add_parser(
        "import-release", help="from the released repository's own file, which is read and never run"
    )
    release.add_argument("file", type=Path, metavar="FILE", help=f"{HOME} of the release, or {BESIDE} beside it")
    release.add_argument("--mode", choices=SYSTEMS, default="agentic_general", help="which of its prompts")
    release.add_argument("--dst", type=Path, metavar="OUT.yaml", help="where to write; by default it is printed")
    release.add_argument("--force", action="store_true", help="replace OUT.yaml also if this command did not write it")
    for one in (parser, release):
        add_debug_flag(one)
    args = parser.parse_args()
    written = args.dst and OutputFile(
        args.dst, f"prompts import-release --mode {args.mode}", inputs=[args.file], force=args.force
    )
    text = to_yaml(import_release(args.file, args.mode), f"{args.mode} of {HOME}, for rollout.prompts_file")
    if written is None:
        print(text, end="")
        return
    written.write(text)
    print(f"{args.dst}: use it with rollout.prompts_file={args.dst}")


if __name__ == "__main__":
    run_cli(main)
