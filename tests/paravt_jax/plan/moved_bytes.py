"""Counts the bytes that a GPU program's loop moves, from the text of its compiled form.

Every instruction reads its operands from memory and writes its result there. A fusion reads only the elements that it
uses, and writes only the updated part of an array that it updates in place.
"""

import math
import re
from collections import defaultdict
from functools import cache
from typing import NamedTuple

ITEM_BYTES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}
NOT_MOVED = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "iota",
    "partition-id",
    "all-reduce-done",
}
BY_ELEMENT = {"bitcast", "convert", "copy", "transpose", "reshape", "add", "subtract", "multiply", "divide", "select"}
BY_ELEMENT |= {"exponential", "negate", "maximum", "minimum"}
PARTS = {"slice", "dynamic-slice", "gather"}  # read a part of their first operand
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # write this operand into their first one


class Instruction(NamedTuple):
    name: str
    type: str
    op: str
    operands: list[str]
    attributes: str
    is_root: bool


def moved_bytes(text: str, cache_bytes: int) -> int:
    """The bytes of an iteration of the outermost loop, without the pages that kernels read from their caches."""
    computations = _parsed(text)
    body = re.findall(r" while\(.*?body=%([\w.-]+)", text)[-1]
    return round(sum(_moved(computations, each, body, cache_bytes) for each in computations[body].values()))


def _moved(computations, instruction: Instruction, body: str, cache_bytes: int) -> float:
    if instruction.op in NOT_MOVED:
        return 0.0
    operands = [_bytes(computations[body][name].type) for name in instruction.operands]
    if instruction.op == "fusion":
        (called,) = re.findall(r"calls=%([\w.-]+)", instruction.attributes)
        return _fused(computations[called])
    if instruction.op == "custom-call":
        return sum(size for size in [*operands, _bytes(instruction.type)] if size != cache_bytes)
    if instruction.op == "all-reduce-start":  # its type repeats the operand
        return 2 * sum(operands)
    assert instruction.op not in {"while", "conditional", "call"}, instruction
    return sum(operands) + _bytes(instruction.type)


def _fused(instructions) -> float:
    users, updated = defaultdict(list), set()
    for each in instructions.values():
        for name in each.operands:
            users[name].append(each)
    (root,) = (each for each in instructions.values() if each.is_root)
    results = [instructions[name] for name in root.operands] if root.op == "tuple" else [root]
    written = 0
    for result in results:
        inner = _without_bitcasts(instructions, result)
        if inner.op in UPDATES:
            updated.add(_without_bitcasts(instructions, instructions[inner.operands[0]]).name)
            inner = instructions[inner.operands[UPDATES[inner.op]]]
        written += _bytes(inner.type)

    @cache
    def read(name: str) -> float:
        """The fraction of an array's elements that the fusion uses."""
        total = float(any(name == result.name for result in results))
        for user in users[name]:
            is_first = user.operands[0] == name
            if user.op in PARTS and is_first:
                total += _size(user.type) / _size(instructions[name].type) * (user.op == "gather" or read(user.name))
            elif user.op in BY_ELEMENT or (user.op == "reduce" and is_first):
                total += read(user.name)
            elif not (user.op in UPDATES and is_first):
                total += 1.0
        return min(1.0, total)

    parameters = [each for each in instructions.values() if each.op == "parameter" and each.name not in updated]
    return written + sum(_bytes(each.type) * read(each.name) for each in parameters)


def _without_bitcasts(instructions, instruction):
    while instruction.op == "bitcast":
        instruction = instructions[instruction.operands[0]]
    return instruction


def _parsed(text: str) -> dict[str, dict[str, Instruction]]:
    computations: dict[str, dict[str, Instruction]] = {}
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            current = computations[header[1]] = {}
        elif found := re.match(r"  (ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:, (.*))?$", line):
            is_root, name, kind, op, operands, attributes = found.groups()
            names = re.findall(r"%([\w.-]+)", operands)
            current[name] = Instruction(name, kind, op, names, attributes or "", bool(is_root))
    return computations


def _bytes(kind: str) -> int:
    return sum(ITEM_BYTES[name] * _count(sizes) for name, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", kind))


def _size(kind: str) -> int:
    return sum(_count(sizes) for sizes in re.findall(r"\[([\d,]*)\]", kind))


def _count(sizes: str) -> int:
    return math.prod(int(size) for size in sizes.split(",") if size)
