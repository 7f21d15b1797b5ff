"""The kernels of attention as the compilers of their chips take them, where there is no such chip."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from model_port.attention import Layout, attention_of
from model_port.sharding import MESH_AXES, on_mesh

topology = pytest.importorskip("paravt_jax.plan.topology").topology

TOKENS = 2048
KERNELS = 3  # forward, gradient of the queries, gradients of keys and values


def lowered(mesh, num_heads, kv_heads, head_dim, causal):
    """A row for each part of fsdp, and the heads over tensor, in the form that `auto` is for so many tokens."""

    def of(*shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def objective(q, k, v, segment_ids):
        order = jnp.broadcast_to(jnp.arange(TOKENS), segment_ids.shape)
        mixed = attention_of("auto")(q, k, v, Layout(segment_ids, jnp.zeros_like(segment_ids), order), causal)
        return jnp.sum(mixed.astype(jnp.float32) ** 2)

    rows = mesh.shape["fsdp"]
    qkv = [
        of(rows, TOKENS, heads, head_dim, dtype=jnp.bfloat16, spec=PartitionSpec("fsdp", None, "tensor"))
        for heads in (num_heads, kv_heads, kv_heads)
    ]
    ids = of(rows, TOKENS, dtype=jnp.int32, spec=PartitionSpec("fsdp"))
    with on_mesh(mesh):
        return jax.jit(jax.grad(objective, argnums=(0, 1, 2))).lower(*qkv, ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "causal"), [(16, 4, 128, True), (4, 4, 72, False)], ids=["text", "vision"]
)
@pytest.mark.parametrize("name", ["a100:8", "h100:8", "b200:8", "v5e:4x4", "v5p:2x2x2", "v6e:4x4"])
def test_auto_is_the_kernel_of_the_chip_that_is_compiled_for(name, num_heads, kv_heads, head_dim, causal):
    try:
        devices = np.array(topology(name).devices())
    except ValueError as missing:
        pytest.skip(str(missing))
    mesh = Mesh(devices.reshape(1, -1, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    program = lowered(mesh, num_heads, kv_heads, head_dim, causal)
    call = "tpu_custom_call" if name.startswith("v") else "triton"
    assert len(re.findall(rf"custom_call @[\w$.]*{call}", program.as_text())) == KERNELS
    scores_bytes = 4 * math.prod((num_heads // 2, TOKENS, TOKENS))
    assert program.compile().memory_analysis().temp_size_in_bytes < scores_bytes
