"""Compiles the sampler's programs for a host's devices, and prints their memory as JSON.

For GPUs, it also prints the bytes that a device moves to sample a token for all rows, besides its pages.

It runs in a separate process, because a TPU compiler aborts on the XLA flags of the tests.

compiled_sampler.py TOPOLOGY PRESET TENSOR ROWS CONTEXT_TOKENS CACHE_TOKENS stacked|split [DTYPE [RANK]]
"""

import json
import math
import sys

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from moved_bytes import moved_bytes

from model_port.adapters import adapter_shapes, add_adapter
from model_port.config import PRESETS, LoraConfig
from model_port.inputs import bucket
from model_port.layers import Compute
from model_port.loading import abstract_model, abstract_params, with_params
from model_port.sampler.frames import TABLE_TOKENS
from model_port.sampler.paged import TABLE_PAGES, kernel_of, walked
from model_port.sampler.pages import PAGE_TOKENS
from model_port.sampler.programs import Cache, Chunk, Rows, decode, prefill
from model_port.sampler.sampler import chunk_tokens
from model_port.sharding import make_mesh, on_mesh
from model_port.text import Visual
from paravt_jax.plan.topology import topology


def main(name, preset, tensor, rows, context_tokens, cache_tokens, stacking, dtype="bfloat16", rank=0):
    try:
        devices = topology(name).devices()
    except ValueError as missing:
        return {"missing": str(missing)}
    config, tensor = PRESETS[preset], int(tensor)
    mesh = make_mesh(len(devices) // tensor, 1, tensor, devices=devices)

    def array(*shape, dtype="int32", spec=()):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def of_a_layer(leaf):
        return array(1, *leaf.shape[1:], dtype=leaf.dtype, spec=leaf.sharding.spec)

    text, num_pages = config.text, 1 + -(-int(cache_tokens) // PAGE_TOKENS) + int(rows)
    model = abstract_model(config, Compute(dtype))
    model = with_params(model, abstract_params(model, dtype, mesh))
    shapes = adapter_shapes(config, int(rank)).items()
    add_adapter(model, LoraConfig(int(rank)), {path: array(*shape, dtype=dtype) for path, shape in shapes}, mesh)
    if stacking == "split":
        graphdef, params = nnx.split(model.text.layers)
        layers = [nnx.merge(graphdef, jax.tree.map(of_a_layer, params)) for _ in range(text.num_layers)]
        if int(rank):  # of adapters on a single device
            shapes = (nnx.eval_shape(joined, layer) for layer in layers)
            layers = [jax.tree.map(lambda leaf: array(*leaf.shape, dtype=leaf.dtype), layer) for layer in shapes]
        model.text.layers = nnx.List(layers)
    graphdef, params = nnx.split(model)
    pages = text.num_kv_heads, text.num_layers * num_pages, PAGE_TOKENS, text.head_dim
    cache = Cache(*(array(*pages, dtype=dtype, spec=("tensor",)) for _ in range(2)))
    features, maps = (1, TABLE_TOKENS, text.width), config.vision.num_deepstack
    frames = Visual(array(*features, dtype=dtype), array(maps, *features, dtype=dtype))
    rows, width = int(rows), bucket(-(-int(context_tokens) // PAGE_TOKENS), TABLE_PAGES)
    numbers = array(rows)
    state = Rows(
        *(numbers, numbers, numbers, array(rows, width), array(rows, 2, dtype=jnp.uint32), numbers, numbers),
        *(array(rows, dtype=jnp.float32), array(rows, 8), array(rows, dtype=bool)),
    )
    num_tokens = chunk_tokens(topology(name).device.platform)
    tokens = array(1, num_tokens)
    chunk = Chunk(tokens, array(1, num_tokens, 3), tokens, tokens, array(1, width), array(num_tokens // PAGE_TOKENS))
    with on_mesh(mesh):
        attend = kernel_of(text.head_dim) or walked
        traced = [
            decode.trace(graphdef, 16, attend, params, cache, state),
            prefill.trace(graphdef, attend, params, cache, frames, chunk),
        ]
        programs = [program.lower().compile() for program in traced]
    held = sum(map(bytes_on_a_device, jax.tree.leaves((params, cache, frames))))
    memory = {"held_bytes": held, "temp_bytes": [each.memory_analysis().temp_size_in_bytes for each in programs]}
    if stacking == "stacked":
        return memory
    return memory | {"moved_bytes": moved_bytes(programs[0].as_text(), bytes_on_a_device(cache.keys))}


def joined(layer):
    layer.join(1)
    return layer


def bytes_on_a_device(leaf):
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
