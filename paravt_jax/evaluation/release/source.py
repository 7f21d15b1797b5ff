"""Extracts texts from a copy of the released repository, whose files are parsed but never executed.

The evaluation's texts are in two files: string constants and f-strings of the driver, and f-strings of the loaders. An
f-string becomes a template, in which our placeholders replace its expressions.
"""

import ast
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from paravt_jax.evaluation.release.texts import OWN_TEXTS, PLACEHOLDERS

COMMIT = "cf55249"
DRIVER, LOADERS = "paravt/eval/driver.py", "paravt/eval/utils.py"
MAX_FILE_BYTES = 2**20
MAX_CHARS = 2**22  # for all strings of a file, because a few lines that double a string could fill the memory
SYSTEMS = {  # our name -> constant of the driver
    "system.direct": "DIRECT_SYSTEM",
    "system.reasoning": "REASONING_SYSTEM",
    "system.agentic_general": "GENERAL_AGENTIC_SYSTEM",
    "system.agentic_minimal": "MINIMAL_AGENTIC_SYSTEM",
    "system.agentic_videozoomer": "VIDEOZOOMER_AGENTIC_SYSTEM",
    "system.agentic_sage": "SAGE_AGENTIC_SYSTEM",
    "system.agentic_longvt": "LONGVT_TOOL_PROMPT_SUFFIX",
}
UNFILLED = "FILL_FROM_"  # prefix of a constant that users of the release must fill in
SCHEMA, SCHEMA_FIELD = "TOOL_SCHEMA", "tool_schema"
SPLIT_NAMES = {"videomme_wsub": "videomme_subtitles"}  # name in the loaders -> our name, where they differ
DRIVER_TEXTS = ("file_name", "response", "response_error", "last.choice", "last.window")
EXPRESSIONS = {  # expression in the release's f-strings -> our placeholder
    "item['question']": "question",
    "opts_str": "options",
    "mcq_instr": "instruction",
    "sub_prefix": "subtitles",
    "sub_text": "lines",
    "caption": "caption",
    "q_text": "question",
    "os.path.basename(vpath)": "name",
    "len(cropped)": "num_frames",
    "st": "start_s",
    "et": "end_s",
}
DIGESTS = {  # hashes of the texts at COMMIT
    "system.direct": "5ebc29666ce3",
    "system.reasoning": "b17c98b728e2",
    "system.agentic_general": "d51e7e18d1aa",
    "system.agentic_minimal": "a6933f68e4de",
    "instruction.direct": "a83f75558421",
    "instruction.other": "8f710e0dc5a0",
    "question.videomme": "4354f7dcfdf6",
    "question.videomme_subtitles": "a66ca375efe0",
    "question.longvideobench": "4354f7dcfdf6",
    "question.lvbench": "a751c910993c",
    "question.mlvu": "4354f7dcfdf6",
    "question.mmvu": "4354f7dcfdf6",
    "question.charades": "bf0a6c57efbd",
    "subtitles": "94498394554a",
    "file_name": "391856c4aa1f",
    "response": "7afb4b4543ad",
    "response_error": "c18e3137bfbc",
    "last.choice": "896362825e99",
    "last.window": "51117be24fdf",
}


class Unreadable(ValueError):
    """Raised for an expression that cannot be evaluated without running the file."""


def read_release(directory: Path) -> dict[str, str]:
    """Reads all texts of the release by name. Texts that users must fill in are included if they did."""
    driver, loaders = (parsed(directory / name) for name in (DRIVER, LOADERS))
    nodes, strings = text_nodes(driver, loaders), Strings(driver)
    texts = {name: _read_text(directory, name, nodes, strings) for name in (*SYSTEMS, *PLACEHOLDERS)}
    return {name: text for name, text in texts.items() if name not in OWN_TEXTS or not text.startswith(UNFILLED)}


def _read_text(directory: Path, name: str, nodes: Mapping[str, ast.expr], strings: "Strings") -> str:
    source = directory / (DRIVER if name in (*SYSTEMS, *DRIVER_TEXTS) else LOADERS)
    if name not in nodes:
        raise ValueError(f"{source} has no text {name}; give the release's commit {COMMIT}")
    try:
        return _template(nodes[name], strings) if name in PLACEHOLDERS else _system(name, nodes, strings)
    except (Unreadable, RecursionError) as problem:
        raise ValueError(f"{source}: the text {name} cannot be read: {problem}") from None


def check_commit(directory: Path, texts: Mapping[str, str]) -> None:
    """Raises ValueError if texts differ from COMMIT's, because the protocol is implemented for that commit."""
    other = [name for name, digest in DIGESTS.items() if text_digest(texts[name]) != digest]
    if other:
        raise ValueError(
            f"{directory} is not the release's commit {COMMIT}: it has other texts of {', '.join(other)}; run "
            f"git -C {directory} checkout {COMMIT}"
        )


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def text_nodes(driver: ast.Module, loaders: ast.Module) -> dict[str, ast.expr]:
    """Finds the expressions of the texts by name; missing texts have no entry."""
    assigned = dict(_module_assignments(driver))
    constants = {name: assigned[constant] for name, constant in SYSTEMS.items() if constant in assigned}
    schema = {SCHEMA: assigned[SCHEMA]} if SCHEMA in assigned else {}
    return {**constants, **schema, **dict(_driver_nodes(driver)), **dict(_loader_nodes(loaders))}


def _module_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _driver_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="q_text")], value=ast.JoinedStr() as value):
                yield "file_name", value
            case ast.If(
                body=[ast.Assign(targets=[ast.Name(id="force")], value=choice), *_],
                orelse=[ast.Assign(targets=[ast.Name(id="force")], value=window), *_],
            ):
                yield from (("last.choice", choice), ("last.window", window))
            case ast.JoinedStr() if _fields(node) == PLACEHOLDERS["response"]:
                yield "response", node
            case ast.JoinedStr() if _fields(node) == PLACEHOLDERS["response_error"]:
                yield "response_error", node


def _loader_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="mcq_instr")], value=ast.IfExp(body=direct, orelse=other)):
                yield from (("instruction.direct", direct), ("instruction.other", other))
            case ast.Assign(targets=[ast.Name(id="sub_prefix")], value=ast.IfExp(body=value)):
                yield "subtitles", value
            case ast.If(
                test=ast.Compare(left=ast.Name(id="dataset_name"), comparators=[ast.Constant(value=str(data_set))])
            ) if (name := f"question.{SPLIT_NAMES.get(data_set, data_set)}") in PLACEHOLDERS:
                yield from ((name, value) for value in _questions(node))


def _questions(block: ast.If) -> Iterator[ast.JoinedStr]:
    for node in (node for statement in block.body for node in ast.walk(statement)):
        match node:
            case ast.Assign(targets=[ast.Name(id="question")], value=ast.JoinedStr() as value):
                yield value
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                for key, value in pairs:
                    if isinstance(key, ast.Constant) and key.value == "question" and isinstance(value, ast.JoinedStr):
                        yield value


def _fields(node: ast.JoinedStr) -> tuple[str, ...]:
    """The placeholders of an f-string; an expression without a placeholder gives its source."""
    sources = [ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
    return tuple(EXPRESSIONS.get(source, source) for source in sources)


def _system(name: str, nodes: Mapping[str, ast.expr], strings: "Strings") -> str:
    """Reads a system text. The two texts with a tool are templates, which the driver fills with the tool's schema."""
    text = strings.read(nodes[name])
    if name in OWN_TEXTS or f"{{{SCHEMA_FIELD}}}" not in text:
        return text
    schema = strings.read(nodes[SCHEMA]) if SCHEMA in nodes else ""
    strings.count_chars(len(text) + text.count(f"{{{SCHEMA_FIELD}}}") * len(schema))
    try:
        return text.replace(f"{{{SCHEMA_FIELD}}}", escaped(schema)).format()
    except (LookupError, ValueError) as problem:
        raise Unreadable(f"it is not a template: {problem}") from None


def _template(node: ast.expr, strings: "Strings") -> str:
    """Turns a string into a template: doubles braces and replaces expressions by our placeholders."""
    if not isinstance(node, ast.JoinedStr):
        return escaped(strings.read(node))
    return "".join(map(_template_part, node.values))


def _template_part(part: ast.expr) -> str:
    match part:
        case ast.Constant(value=str(text)):
            return escaped(text)
        case ast.FormattedValue(value=value, conversion=-1, format_spec=spec):
            source = ast.unparse(value)
            if source in EXPRESSIONS and (spec is None or ast.unparse(spec) == ast.unparse(ONE_DECIMAL)):
                return f"{{{EXPRESSIONS[source]}{':.1f' if spec else ''}}}"
    raise Unreadable(f"line {part.lineno}, {ast.unparse(part)[:60]!r}, is not an expression of the release")


ONE_DECIMAL = ast.JoinedStr(values=[ast.Constant(value=".1f")])


class Strings:
    """A module's string constants, evaluated without running the module."""

    def __init__(self, tree: ast.Module):
        self._nodes = dict(_module_assignments(tree))
        self._chars_left = MAX_CHARS

    def read(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name) if name in self._nodes:
                return self.read(self._nodes[name])
            case ast.BinOp(left=first, op=ast.Add(), right=second):
                return self._join([first, second])
            case ast.JoinedStr(values=parts):
                return self._join(parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.read(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="json"), attr="dumps"), args=[value], keywords=[]):
                return _dump_literal(value)
        raise Unreadable(f"line {node.lineno}, {ast.unparse(node)[:60]!r}, is not a string literal")

    def count_chars(self, num_chars: int) -> None:
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise Unreadable(f"it builds strings of more than {MAX_CHARS} characters")

    def _join(self, nodes: list[ast.expr]) -> str:
        parts = [self.read(node) for node in nodes]
        self.count_chars(sum(map(len, parts)))
        return "".join(parts)


def _dump_literal(node: ast.expr) -> str:
    try:
        return json.dumps(ast.literal_eval(node))
    except (ValueError, TypeError, MemoryError):
        raise Unreadable(f"line {node.lineno} dumps a value that is not a literal") from None


def escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def parsed(path: Path) -> ast.Module:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the directory of the released repository, commit {COMMIT}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes; it is not a file of the release")
    try:
        with warnings.catch_warnings(action="ignore"):  # style warnings about the release's code
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        raise ValueError(f"{path} is not a Python file: {problem}") from None
