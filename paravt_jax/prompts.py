"""Prompts from elsewhere: `python -m paravt_jax.prompts import-release FILE` reads those of the published release.

The release keeps what it tells its agents in `paravt/eval/driver.py`, as string constants:

    GENERAL_AGENTIC_SYSTEM    --mode agentic_general: the published policy, in its tables
    MINIMAL_AGENTIC_SYSTEM    --mode agentic_minimal: the same policy, on temporal grounding
    REASONING_SYSTEM          --mode reasoning: without a tool
    DIRECT_SYSTEM             --mode direct: without a tool
    TOOL_SCHEMA               stands in the first two, for {tool_schema}
    q_text = f"{q_text} …"    what is said after the question where there is a tool: how the video is called

The file is parsed and never run: what is neither a literal nor put together from such cannot be read. The words of its
sub-agent are in another file, with times as MM:SS; those of a forced last answer depend on the data set. Neither is
imported. DIFFERS: the video is called by our name for it, `video.mp4`, there by that of its file.
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

SYSTEMS = {  # --mode: the constant
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
MAX_CHARS = 2**22  # of all that is put together while a file is read


class Unreadable(ValueError):
    """An expression that says something only when it is run."""


class TooLong(Exception):
    """A few lines that double a text would otherwise take all memory."""


@dataclass(frozen=True)
class Strings:
    """The string constants of a module, by name; of those that cannot be read, why."""

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
    if SCHEMA_PLACE in system:  # a text with placeholders there, too
        schema = _doubled(_text(SCHEMA, strings, path))
        if len(system) + system.count(SCHEMA_PLACE) * len(schema) > MAX_CHARS:
            raise TooLong
        system = system.replace(SCHEMA_PLACE, schema)
    else:
        system = _doubled(system)
    prompts = {"system": system, "system_has_tools": True}
    called = next(_questions(tree), None)
    if called is None:  # then the line before the frames is left to say how the video is called
        return prompts | {"with_tool": "{question}"}
    return prompts | {"overview": "", "with_tool": called}


def _without_tool(strings: Strings, path: Path, mode: str) -> dict[str, Any]:
    return {"system": _doubled(_text(SYSTEMS[mode], strings, path)), "overview": "", "without_tool": "{question}"}


def strings_of(tree: ast.Module) -> Strings:
    """The values of a module's assignments, as far as they can be evaluated without running them."""
    reader = _Reader(Strings({}, {}))
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and value is not None:
            reader.assign(target.id, value)
    return reader.found


class _Reader:
    """Evaluates assignments one after the other; what it puts together is bounded over all of them."""

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
    """What is made of a question where that is the f-string `q_text = f"{q_text}…{…}…"`: a text for with_tool."""
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
    """As it stands in a text with placeholders, in which a brace of its own is written twice."""
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
        with warnings.catch_warnings(action="ignore"):  # about a style that is not ours
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        raise ValueError(f"{path} is no Python file: {problem}") from None


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as they are read."""

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
