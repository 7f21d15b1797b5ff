"""Compiles an update ahead of time on every mesh of other devices, for memory, estimated time and price."""

import argparse
from typing import Any

import jax

from model_port.terminal import say
from paravt_jax.bench.mesh_case import name_of, shapes_of
from paravt_jax.bench.mesh_rows import (
    benched_run,
    estimated_on,
    in_order,
    problem_of,
    row_of,
    servers_remark,
    summary,
    unknowns,
)
from paravt_jax.plan.plan import assumed_of_seconds
from paravt_jax.plan.topology import topology


def estimated_meshes(args: argparse.Namespace) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cpu")  # compilation needs no device
    target = topology(args.topology)
    run = benched_run(args).calibrated_on(target.device)
    learner = target.without_gpus(run.server_gpus)
    remarks = [*run.remarks, *servers_remark(run.server_gpus, len(learner))]
    everything = None if args.plan_only else target.devices()
    devices = None if everything is None else [everything[number] for number in learner]
    rows = []
    for shape in shapes_of(args, len(learner)):
        if devices is not None:
            say(f"{name_of(shape)}: compiling")
        own, _, mesh_estimate = estimated_on(shape, run, target.device, devices)
        rows.append(row_of(mesh_estimate, own, run, target.num_hosts))
        say(f"{name_of(shape)}: {summary(rows[-1])}")
    return {
        "title": run.title,
        "topology": args.topology,
        "device": target.device.name,
        "num_devices": len(learner),
        "num_hosts": target.num_hosts,
        "price": args.price,
        "num_steps": run.num_steps,
        "assumed": [*remarks, *assumed_of_seconds(target.device, run.dtype, len(learner)), *unknowns(rows)],
        "rows": in_order(rows),
        "problem": problem_of(rows, run, target.device, len(learner)),
    }
