"""Counts the FLOPs of a traced program: all matrix products, multiplied by the trip counts of loops.

A loop with a data-dependent trip count iterates over the key blocks that a query block attends to. For a single causal
sequence of n blocks, each attends to itself and all earlier blocks, which is (n + 1) / 2 on average.
"""

import math
from typing import Any

import jax


def product_flops(jaxpr: Any, mean_turns: float = 1.0) -> float:
    """FLOPs of all products, 2·a·b·c for [a, b] and [b, c]. `mean_turns`: trip count of data-dependent loops."""
    total = 0.0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * eqn.outvars[0].aval.size * depth
        elif name == "scan":
            length = params["length"]
            total += length * product_flops(params["jaxpr"].jaxpr, (length + 1) / 2)
        elif name == "while":
            total += mean_turns * product_flops(params["body_jaxpr"].jaxpr)
        elif name == "cond":
            total += max(product_flops(branch.jaxpr, mean_turns) for branch in params["branches"])
        elif name == "pallas_call":
            total += params["cost_estimate"].flops  # a kernel's loops are not visible, but it states its cost
        else:  # shard_map has the shapes of a single device
            times = params["mesh"].size if name == "shard_map" else 1
            inner = filter(_is_jaxpr, jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr))
            total += times * sum(product_flops(getattr(part, "jaxpr", part), mean_turns) for part in inner)
    return total


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
