"""An update on every mesh of devices that are not here: what fits, how fast it would be, what it would cost."""

import argparse
import sys
from typing import Any

import jax

from paravt_jax.bench.mesh_case import name_of, shapes_of
from paravt_jax.bench.mesh_rows import (
    benched_run,
    estimated_on,
    in_order,
    row_of,
    said,
    servers_remark,
    unknowns,
)
from paravt_jax.plan.plan import assumed_of_seconds
from paravt_jax.plan.topology import topology


def estimated_meshes(args: argparse.Namespace) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cpu")  # nothing of this computes, and compilers look for no device
    place, run = topology(args.topology), benched_run(args)
    learner = place.without_gpus(run.server_gpus)
    remarks = [*run.remarks, *servers_remark(run.server_gpus, len(learner))]
    everything = None if args.plan_only else place.devices()
    devices = None if everything is None else [everything[number] for number in learner]
    rows = []
    for shape in shapes_of(args, len(learner)):
        print(f"{name_of(shape)}: ", end="", file=sys.stderr, flush=True)
        own, _, found = estimated_on(shape, run, place.device, devices)
        rows.append(row_of(found, own, args.price))
        print(said(rows[-1]), file=sys.stderr, flush=True)
    return {
        "title": run.title,
        "topology": args.topology,
        "device": place.device.name,
        "num_devices": len(learner),
        "num_hosts": place.num_hosts,
        "price": args.price,
        "assumed": [*remarks, *assumed_of_seconds(place.device, run.dtype, len(learner)), *unknowns(rows)],
        "rows": in_order(rows),
    }
