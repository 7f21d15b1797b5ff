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
SCHEMA_PLACEHOLDER = "{tool_schema}"
QUESTION = "q_text"
RELEASE_FILE = "paravt/eval/driver.py"
MAX_FILE_BYTES = 2**20
MAX_CHARS = 2**22  # limit for all strings built while reading a file: a few lines that double a string fill the memory


class Unreadable(ValueError):
    """An expression that only running the file could evaluate."""


def import_release(path: Path, mode: str) -> dict[str, Any]:
    """The prompts of a mode, with the keys of rollout.prompts."""
    tree = _parse(path)
    constants = StringConstants(path, tree)
    prompts = _with_tool(tree, constants, mode) if mode in WITH_TOOL else _without_tool(constants, mode)
    for name, value in prompts.items():
        if problem := placeholder_problem(name, value):
            raise ValueError(f"{path}: of --mode {mode}, {problem}")
    return prompts


def _with_tool(tree: ast.Module, constants: "StringConstants", mode: str) -> dict[str, Any]:
    system = constants[SYSTEMS[mode]]
    if SCHEMA_PLACEHOLDER in system:  # this constant is a template in the release, too
        schema = _escaped(constants[SCHEMA])
        constants.count_chars(len(system) + system.count(SCHEMA_PLACEHOLDER) * len(schema))
        system = system.replace(SCHEMA_PLACEHOLDER, schema)
    else:
        system = _escaped(system)
    prompts = {"system": system, "system_has_tools": True}
    question = next(_question_templates(tree), None)
    if question is None:  # keep our overview prompt, which names the video
        return prompts | {"with_tool": "{question}"}
    return prompts | {"overview": "", "with_tool": question}


def _without_tool(constants: "StringConstants", mode: str) -> dict[str, Any]:
    return {"system": _escaped(constants[SYSTEMS[mode]]), "overview": "", "without_tool": "{question}"}


class StringConstants:
    """A module's string constants by name, evaluated in order without running the module."""

    def __init__(self, path: Path, tree: ast.Module):
        self._path = path
        self._chars_left = MAX_CHARS
        self._texts: dict[str, str] = {}
        self._problems: dict[str, str] = {}  # why other constants cannot be read
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._assign(name, value)

    def __getitem__(self, name: str) -> str:
        if name in self._problems:
            raise ValueError(f"{self._path}: {name} cannot be read: {self._problems[name]}")
        if name not in self._texts:
            names = ", ".join(self._texts) or "none"
            raise ValueError(
                f"{self._path} has no string constant {name}, which the release has in {RELEASE_FILE}. It has: {names}"
            )
        return self._texts[name]

    def count_chars(self, num_chars: int) -> None:
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise ValueError(f"{self._path} builds strings of more than {MAX_CHARS} characters; give {RELEASE_FILE}")

    def _assign(self, name: str, value: ast.expr) -> None:
        try:
            self._texts[name] = self._read(value)
        except (Unreadable, RecursionError) as problem:
            self._texts.pop(name, None)
            self._problems[name] = str(problem)

    def _read(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name) if name in self._texts:
                return self._texts[name]
            case ast.BinOp(left=first, op=ast.Add(), right=second):
                return self._join([first, second])
            case ast.JoinedStr(values=parts):
                return self._join(parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._read(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="json"), attr="dumps"), args=[value], keywords=[]):
                return _dump_literal(value)
        source = repr(ast.unparse(node)[:60])
        raise Unreadable(f"line {node.lineno}, {source}, is not a string literal")

    def _join(self, nodes: list[ast.expr]) -> str:
        parts = [self._read(node) for node in nodes]
        self.count_chars(sum(map(len, parts)))
        return "".join(parts)


def _dump_literal(node: ast.expr) -> str:
    try:
        return json.dumps(ast.literal_eval(node))
    except (ValueError, TypeError, MemoryError):
        raise Unreadable(f"line {node.lineno} dumps a value that is not a literal") from None


def _question_templates(tree: ast.Module) -> Iterator[str]:
    """Finds assignments `q_text = f"{q_text}…{…}…"` and returns their text as a template for with_tool."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id=first)), *parts]),
            ) if name == first == QUESTION:
                texts = (_escaped(str(p.value)) if isinstance(p, ast.Constant) else "{names}" for p in parts)
                yield "{question}" + "".join(texts)


def _escaped(text: str) -> str:
    """Escapes braces for a template."""
    return text.replace("{", "{{").replace("}", "}}")


def _parse(path: Path) -> ast.Module:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; give the release's {RELEASE_FILE}")
    try:
        with warnings.catch_warnings(action="ignore"):  # about the style of the release's code
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        raise ValueError(f"{path} is not a Python file: {problem}") from None


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as literal blocks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(prompts: dict[str, Any], comment: str) -> str:
    dumped = yaml.dump(prompts, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return f"# {comment}\n{dumped}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.prompts"), description="Write a file for rollout.prompts_file."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    release = commands.add_parser(
        "import-release", help="from a file of the released repository, which is parsed and never run"
    )
    release.add_argument("file", type=Path, metavar="FILE", help=f"{RELEASE_FILE} of the release")
    release.add_argument("--mode", choices=SYSTEMS, default="agentic_general", help="the prompts to import")
    release.add_argument("--dst", type=Path, metavar="OUT.yaml", help="output file (default: print to stdout)")
    release.add_argument("--force", action="store_true", help="replace OUT.yaml even if another command wrote it")
    add_debug_flag(parser)
    add_debug_flag(release)
    args = parser.parse_args()
    written = args.dst and OutputFile(
        args.dst, f"prompts import-release --mode {args.mode}", inputs=[args.file], force=args.force
    )
    text = to_yaml(import_release(args.file, args.mode), f"{args.mode} of {RELEASE_FILE}, for rollout.prompts_file")
    if written is None:
        print(text, end="")
        return
    written.write(text)
    print(f"{args.dst}: use it with rollout.prompts_file={args.dst}")


if __name__ == "__main__":
    run_cli(main)
