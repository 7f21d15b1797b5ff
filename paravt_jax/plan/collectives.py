"""Parses the collectives of a compiled program from its HLO text, and estimates their time.

The text has output shapes and device groups for every operation, and trip counts for loops.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from paravt_jax.plan.devices import DEVICES_OF_A_HOST, Rates

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BYTES = {"pred": 1, "bf16": 2} | {f"{kind}{bits}": bits // 8 for kind in "fsu" for bits in (8, 16, 32, 64)}

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%\S+ = (?P<type>.*?) (?P<operation>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r"known_trip_count[^\d]*(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CALLS = ("call", "conditional", "async-start", "fusion")
_COUNTED = r"\[(?P<source>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
_GROUP_OF_MESH = re.compile(
    rf"replica_groups=mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\({_COUNTED}\))?\s*\{{(?P<axes>[^}}]*)\}}"
)
_GROUP_BY_COUNTING = re.compile(rf"replica_groups=\[(?P<shape>[\d,]+)\]<={_COUNTED}")
_GROUP_BY_NUMBERS = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")
_GROUP = re.compile(r"replica_groups=(?!\{\})[^, ]*")
_AXIS = re.compile(r"'([^']+)'=(\d+)")


@dataclass(frozen=True)
class Collective:
    """A collective operation, with its bytes over all loop iterations."""

    kind: str
    num_bytes: int  # size of the whole array, input or output, whichever is larger
    num_devices: int = 1  # participating devices
    num_hosts: int = 1  # hosts of these devices

    def seconds(self, rates: Rates) -> float:
        """Time on a ring: each device receives all parts but its own; bytes from other hosts cross network cards.

        An all-reduce sends everything twice. In a permute, each device of a pair has a whole array.
        """
        num_bytes = (2 if self.kind in ("all-reduce", "collective-permute") else 1) * self.num_bytes
        devices, hosts = self.num_devices, self.num_hosts
        by_links = num_bytes * (devices - 1) / devices / rates.link_bytes_among(devices) if devices > 1 else 0.0
        by_cards = num_bytes * (hosts - 1) / devices / rates.network_bytes  # a host's devices share its traffic
        return max(by_links, by_cards)


def among(kind: str, num_bytes: int, num_devices: int, stride: int, host_devices: int) -> Collective:
    """Makes a collective over devices that are `stride` apart in the mesh's order."""
    num_hosts = min(num_devices, math.ceil(num_devices * stride / host_devices))
    return Collective(kind, num_bytes if num_devices > 1 else 0, num_devices, num_hosts)


def bytes_by_kind(collectives: list[Collective]) -> dict[str, int]:
    return {
        kind: sum(each.num_bytes for each in collectives if each.kind == kind)
        for kind in KINDS
        if any(each.kind == kind for each in collectives)
    }


def collectives_of(text: str, host_devices: int = DEVICES_OF_A_HOST) -> list[Collective]:
    """Parses the collectives in a program's HLO text. A loop with an unknown trip count counts once."""
    computations, entry = _computations(text)
    return list(_walk(computations, entry, 1, host_devices))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Splits HLO text into lines by computation; returns them with the entry computation's name."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        header = None if line.startswith(" ") else _COMPUTATION.match(line)
        if header is not None:
            lines = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        else:
            lines.append(line)
    return computations, entry


def _walk(computations: Mapping[str, list[str]], name: str, times: int, host_devices: int) -> Iterator[Collective]:
    for line in computations.get(name, ()):
        instruction = _INSTRUCTION.match(line)
        if instruction is None:
            continue
        operation = instruction["operation"].removesuffix("-start")
        if operation in KINDS:
            members = _first_group(line)
            hosts = {member // host_devices for member in members}
            num_bytes = times * _num_bytes(instruction["operation"], instruction["type"], len(members))
            yield Collective(operation, num_bytes, len(members), len(hosts))
        elif operation == "while":
            body = _BODY.search(line)
            assert body is not None
            yield from _walk(computations, body[1], times * _trip_count(computations, line), host_devices)
        elif instruction["operation"] in _CALLS:
            branches = _BRANCHES.search(line)
            names = [] if branches is None else [part.strip().lstrip("%") for part in branches[1].split(",")]
            for called in [*names, *_CALLED.findall(line)]:
                yield from _walk(computations, called, times, host_devices)


def _trip_count(computations: Mapping[str, list[str]], line: str) -> int:
    """The trip count, from the compiler's annotation or the only constant in the loop's condition."""
    annotation, condition = _TRIP_COUNT.search(line), _CONDITION.search(line)
    if annotation is not None or condition is None:
        return int(annotation[1]) if annotation else 1
    limits = [limit for text in computations.get(condition[1], ()) for limit in _CONSTANT.findall(text)]
    return int(limits[0]) if len(limits) == 1 else 1


def _num_bytes(operation: str, result_type: str, num_devices: int) -> int:
    """Bytes of the whole arrays. An async start returns a pair of inputs and outputs."""
    sizes = [sum(map(_array_bytes, _ARRAY.findall(element))) for element in _elements(result_type)]
    if operation.endswith("-start") and not operation.startswith("all-reduce"):
        return max(sizes)
    return sum(sizes) * (num_devices if operation == "reduce-scatter" else 1)


def _array_bytes(array: tuple[str, str]) -> int:
    kind, sizes = array
    return ITEM_BYTES.get(kind, 0) * math.prod(map(int, filter(None, sizes.split(","))))


def _elements(result_type: str) -> list[str]:
    """The elements of a tuple type, or the type itself."""
    if not result_type.startswith("("):
        return [result_type]
    elements, depth = [""], 0
    for letter in result_type[1:-1]:
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and not depth:
            elements.append("")
        else:
            elements[-1] += letter
    return elements


def _first_group(line: str) -> tuple[int, ...]:
    """Device numbers of the first group; a single device if the operation names no groups."""
    if groups := _GROUP_OF_MESH.search(line):
        axes = {name: int(size) for name, size in _AXIS.findall(groups["mesh"])}
        group_axes = set(re.findall(r"'([^']+)'", groups["axes"]))
        numbers = _device_numbers(groups, math.prod(axes.values())).reshape(*axes.values())
        return tuple(numbers[tuple(slice(None) if name in group_axes else 0 for name in axes)].ravel().tolist())
    if groups := _GROUP_BY_COUNTING.search(line):
        shape = _numbers(groups["shape"])
        return tuple(_device_numbers(groups, math.prod(shape)).reshape(shape)[0].tolist())
    if groups := _GROUP_BY_NUMBERS.search(line):
        return tuple(_numbers(groups[1]))
    if groups := _GROUP.search(line):
        raise ValueError(f"unknown format of device groups in a compiled program: {groups[0]!r}")
    return (0,)


def _device_numbers(groups: re.Match[str], num_devices: int) -> np.ndarray:
    if groups["source"] is None:
        return np.arange(num_devices)
    numbers = np.arange(num_devices).reshape(_numbers(groups["source"]))
    return numbers.transpose(_numbers(groups["order"])) if groups["order"] else numbers


def _numbers(text: str) -> list[int]:
    return list(map(int, text.split(",")))
