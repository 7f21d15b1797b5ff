"""Stage `gradient`: compares kernel gradients of three layers of both towers with transformers."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from model_port.config import ModelConfig
from model_port.inputs import TextBatch, VisionBatch
from model_port.layers import Compute, num_layers, split
from model_port.loading import PER_LAYER, abstract_model, abstract_params, load_computing, one_sequence, with_params
from model_port.model import VLModel
from model_port.output_dir import GIB
from model_port.reference import ProcessedPrompt, Reference, missing_torch
from model_port.rule import Rule
from model_port.sharding import flat_params, param_name
from model_port.weights import rules, stored_dtype
from paravt_jax.check.prompts import video_of
from paravt_jax.check.report import NO_TORCH, Facts, Measured
from paravt_jax.check.target import Target
from paravt_jax.run.compiles import set_up_compilation

MAX_RELATIVE = 1e-4  # relative error of a kernel's gradient, in float32
COMPUTE = Compute("float32", remat="full")


def gradient(target: Target) -> Iterator[Measured | Facts]:
    set_up_compilation()
    if missing_torch():
        yield Measured("ours = transformers'", skipped=NO_TORCH)
        return
    prompt = video_of(target)
    program = compiled_gradients(target, prompt)
    if memory := program.memory_analysis():
        num_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        yield {"planned_gib": num_bytes / GIB}
    ours = our_gradients(program, target, prompt)
    with Reference(target.hf_dir) as reference:
        theirs = reference.gradients(prompt, ours)
    for tower in ("vision", "text"):
        names = [rule.hf_names[layer] for rule, layer in kernels(target.config) if rule.path.startswith(tower)]
        errors = [relative_error(ours[name], theirs[name]) for name in names]
        worst = int(np.argmax(errors))  # NaN is the worst
        yield Measured(f"{tower} tower, worst of {len(errors)} kernels: {names[worst]}", errors[worst], MAX_RELATIVE)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def kernels(config: ModelConfig) -> list[tuple[Rule, int]]:
    """The compared kernels, each in the first, middle and last layer."""
    stacked = [rule for rule in rules(config) if rule.count is not None and len(rule.hf_shape) > 1]
    return [(rule, layer) for rule in stacked for layer in compared_layers(rule.count or 0)]


def compared_layers(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def stack_starts(count: int) -> list[int]:
    """The first layer of each stack, and the number of layers. Every compared layer is a separate stack."""
    return sorted({start for layer in compared_layers(count) for start in (layer, layer + 1)})


def place(rule: Rule, layer: int) -> tuple[str, int]:
    """The parameter that has a layer's kernel after `apart`, and the layer's index in it."""
    for layers in ("vision.blocks.", "text.layers."):
        if rule.path.startswith(layers):
            stack = stack_starts(rule.count or 0).index(layer)
            return f"{layers}{stack}.{rule.path.removeprefix(layers)}", 0
    return rule.path, layer


def apart(model: VLModel) -> VLModel:
    """Puts each compared layer into a separate stack, because the gradients of all layers of an 8B take 31 GiB."""
    for tower, name in ((model.vision, "blocks"), (model.text, "layers")):
        stack = getattr(tower, name)
        setattr(tower, name, split(stack, np.diff(stack_starts(num_layers(stack))).tolist()))
    return model


def compared(model: VLModel) -> tuple[nnx.GraphDef[VLModel], nnx.State, nnx.State]:
    """Splits a model into its structure, the compared kernels, and all other parameters."""
    names = {place(rule, layer)[0] for rule, layer in kernels(model.config)}
    graphdef, chosen, others = nnx.split(model, lambda path, _: param_name(path) in names, ...)
    return graphdef, chosen, others


def compiled_gradients(target: Target, prompt: ProcessedPrompt) -> jax.stages.Compiled:
    """Compiles the kernels' gradients, with the kernels in float32 and all other weights as they are stored."""
    num_tokens, stored = len(prompt.ids), stored_dtype(target.hf_dir)
    model = abstract_model(target.config, COMPUTE)
    graphdef, chosen, others = compared(nnx.eval_shape(apart, with_params(model, abstract_params(model, stored))))

    def gradients(chosen: nnx.State, others: nnx.State, text: TextBatch, frames: VisionBatch | None) -> nnx.State:
        def objective(chosen: nnx.State) -> jax.Array:
            """The prompt's mean negative log-prob."""
            logits = nnx.merge(graphdef, chosen, others)(text, frames)[0, : num_tokens - 1]
            following = jnp.asarray(text.tokens)[0, 1:num_tokens]
            return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

        return jax.grad(objective)(chosen)

    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), chosen)
    sequence = one_sequence(target.config, prompt.ids, **prompt.media)
    with jax.default_matmul_precision("highest"):
        return jax.jit(gradients).lower(wide, others, *sequence).compile(PER_LAYER)


def our_gradients(program: jax.stages.Compiled, target: Target, prompt: ProcessedPrompt) -> dict[str, np.ndarray]:
    """Computes the compared kernels' gradients, by published name."""
    _, chosen, others = compared(apart(load_computing(target.hf_dir, "float32")))
    chosen = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), chosen)
    jax.block_until_ready(chosen)  # until this ends, the stored kernels are in memory too
    found = flat_params(program(chosen, others, *one_sequence(target.config, prompt.ids, **prompt.media)))
    return {
        rule.hf_names[layer]: np.array(found[name][index].reshape(rule.hf_shape))
        for rule, layer in kernels(target.config)
        for name, index in [place(rule, layer)]
    }
