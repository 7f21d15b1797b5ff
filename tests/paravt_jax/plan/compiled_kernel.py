"""Compiles attention and its gradients ahead of time and prints the program as JSON.

It runs in a separate process, because a TPU compiler aborts on the XLA flags of the tests.

python tests/paravt_jax/plan/compiled_kernel.py TOPOLOGY QUERY_HEADS KEY_HEADS HEAD_DIM causal|whole TOKENS
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from model_port.attention import Layout, attention_of
from model_port.sharding import MESH_AXES, on_mesh
from paravt_jax.plan.topology import topology


def lowered(mesh, heads, kv_heads, head_dim, causal, num_tokens):
    """Lowers one row per fsdp part, heads over tensor, with the kernel that `auto` uses after its check."""

    def abstract(*shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def objective(q, k, v, segment_ids):
        order = jnp.broadcast_to(jnp.arange(num_tokens), segment_ids.shape)
        mixed = attention_of("auto_kernel")(q, k, v, Layout(segment_ids, jnp.zeros_like(segment_ids), order), causal)
        return jnp.sum(mixed.astype(jnp.float32) ** 2)

    rows = mesh.shape["fsdp"]
    qkv = [
        abstract(rows, num_tokens, n, head_dim, dtype=jnp.bfloat16, spec=PartitionSpec("fsdp", None, "tensor"))
        for n in (heads, kv_heads, kv_heads)
    ]
    ids = abstract(rows, num_tokens, dtype=jnp.int32, spec=PartitionSpec("fsdp"))
    with on_mesh(mesh):
        return jax.jit(jax.grad(objective, argnums=(0, 1, 2))).lower(*qkv, ids)


def main(name, heads, kv_heads, head_dim, kind, num_tokens):
    try:
        devices = np.array(topology(name).devices())
    except ValueError as missing:
        return {"missing": str(missing)}
    mesh = Mesh(devices.reshape(1, -1, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    program = lowered(mesh, int(heads), int(kv_heads), int(head_dim), kind == "causal", int(num_tokens))
    return {"text": program.as_text(), "temp_bytes": program.compile().memory_analysis().temp_size_in_bytes}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
