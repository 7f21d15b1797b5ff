"""The collectives of a compiled program, read from its HLO text, and their time.

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
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%\S+ = (?P<made>.*?) (?P<operation>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_TURNS = re.compile(r"known_trip_count[^\d]*(\d+)")
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
    """A collective operation, with the bytes of all its runs."""

    kind: str
    num_bytes: int  # of the whole array: input or output, the larger
    num_devices: int = 1  # that participate
    num_hosts: int = 1  # that these devices belong to

    def seconds(self, rates: Rates) -> float:
        """Time on a ring: each device receives all but its own part; bytes from other hosts cross network cards."""
        num_bytes = (2 if self.kind == "all-reduce" else 1) * self.num_bytes
        devices, hosts = self.num_devices, self.num_hosts
        by_links = num_bytes * (devices - 1) / devices / rates.link_bytes
        by_cards = num_bytes * (hosts - 1) / devices / rates.network_bytes  # a host's devices share the traffic
        return max(by_links, by_cards)


def among(kind: str, num_bytes: int, num_devices: int, stride: int) -> Collective:
    """A collective of devices `stride` apart in the order of the mesh."""
    num_hosts = min(num_devices, math.ceil(num_devices * stride / DEVICES_OF_A_HOST))
    return Collective(kind, num_bytes if num_devices > 1 else 0, num_devices, num_hosts)


def bytes_by_kind(collectives: list[Collective]) -> dict[str, int]:
    return {
        kind: sum(each.num_bytes for each in collectives if each.kind == kind)
        for kind in KINDS
        if any(each.kind == kind for each in collectives)
    }


def collectives_of(text: str) -> list[Collective]:
    """The collectives in a program's HLO text. A loop of unknown trip count counts once."""
    computations, entry = _computations(text)
    return list(_walk(computations, entry, 1))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines by computation, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        begun = None if line.startswith(" ") else _COMPUTATION.match(line)
        if begun is not None:
            lines = computations.setdefault(begun["name"], [])
            entry = begun["name"] if begun["entry"] else entry
        else:
            lines.append(line)
    return computations, entry


def _walk(computations: Mapping[str, list[str]], name: str, times: int) -> Iterator[Collective]:
    for line in computations.get(name, ()):
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        operation = found["operation"].removesuffix("-start")
        if operation in KINDS:
            members = _members(line)
            hosts = {member // DEVICES_OF_A_HOST for member in members}
            num_bytes = times * _num_bytes(found["operation"], found["made"], len(members))
            yield Collective(operation, num_bytes, len(members), len(hosts))
        elif operation == "while":
            body = _BODY.search(line)
            assert body is not None
            yield from _walk(computations, body[1], times * _turns(computations, line))
        elif found["operation"] in _CALLS:
            branches = _BRANCHES.search(line)
            named = [] if branches is None else [part.strip().lstrip("%") for part in branches[1].split(",")]
            for called in [*named, *_CALLED.findall(line)]:
                yield from _walk(computations, called, times)


def _turns(computations: Mapping[str, list[str]], line: str) -> int:
    """A loop's trip count: from the compiler, or the only constant in its condition."""
    said, condition = _TURNS.search(line), _CONDITION.search(line)
    if said is not None or condition is None:
        return int(said[1]) if said else 1
    limits = [limit for text in computations.get(condition[1], ()) for limit in _CONSTANT.findall(text)]
    return int(limits[0]) if len(limits) == 1 else 1


def _num_bytes(operation: str, made: str, num_devices: int) -> int:
    """Bytes of the whole arrays. An async start returns a pair: inputs and outputs."""
    parts = _parts(made)
    sizes = [sum(map(_array_bytes, _ARRAY.findall(part))) for part in parts]
    if operation.endswith("-start") and not operation.startswith("all-reduce"):
        return max(sizes)
    return sum(sizes) * (num_devices if operation == "reduce-scatter" else 1)


def _array_bytes(array: tuple[str, str]) -> int:
    kind, sizes = array
    return ITEM_BYTES.get(kind, 0) * math.prod(map(int, filter(None, sizes.split(","))))


def _parts(made: str) -> list[str]:
    """The elements of a tuple type, or the type itself."""
    if not made.startswith("("):
        return [made]
    parts, depth = [""], 0
    for letter in made[1:-1]:
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _members(line: str) -> tuple[int, ...]:
    """Device numbers of the first group; one device if the program names none."""
    if found := _GROUP_OF_MESH.search(line):
        axes = {name: int(size) for name, size in _AXIS.findall(found["mesh"])}
        wanted = set(re.findall(r"'([^']+)'", found["axes"]))
        places = _counted(found, math.prod(axes.values())).reshape(*axes.values())
        return tuple(places[tuple(slice(None) if name in wanted else 0 for name in axes)].ravel().tolist())
    if found := _GROUP_BY_COUNTING.search(line):
        shape = _numbers(found["shape"])
        return tuple(_counted(found, math.prod(shape)).reshape(shape)[0].tolist())
    if found := _GROUP_BY_NUMBERS.search(line):
        return tuple(_numbers(found[1]))
    if found := _GROUP.search(line):
        raise ValueError(f"{found[0]!r} of a compiled program is not understood: cannot read which devices take part")
    return (0,)


def _counted(found: re.Match[str], num_devices: int) -> np.ndarray:
    """Numbers of devices, in the order that the program gives them."""
    if found["source"] is None:
        return np.arange(num_devices)
    places = np.arange(num_devices).reshape(_numbers(found["source"]))
    return places.transpose(_numbers(found["order"])) if found["order"] else places


def _numbers(text: str) -> list[int]:
    return list(map(int, text.split(",")))
