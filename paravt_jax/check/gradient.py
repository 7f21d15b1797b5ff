"""Stage `gradient`: the kernels' gradients of three layers of both towers, compared with transformers'."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from model_port.inputs import TextBatch, VisionBatch
from model_port.layers import Compute
from model_port.loading import abstract_model, abstract_params, load_computing, one_sequence, with_params
from model_port.output_dir import GIB
from model_port.reference import ProcessedPrompt, Reference, missing_torch
from model_port.rule import Rule
from model_port.sharding import flat_params
from model_port.weights import rules, stored_dtype
from paravt_jax.check.prompts import video_of
from paravt_jax.check.report import NO_TORCH, Facts, Measured
from paravt_jax.check.target import Target
from paravt_jax.run.compiles import set_up_compilation

MAX_RELATIVE = 1e-4  # of a kernel, in float32
COMPUTE = Compute("float32", remat="full")


def gradient(target: Target) -> Iterator[Measured | Facts]:
    set_up_compilation()
    if missing_torch():
        yield Measured("ours = transformers'", skipped=NO_TORCH)
        return
    kernels = [rule for rule in rules(target.config) if rule.count is not None and len(rule.hf_shape) > 1]
    prompt = video_of(target)
    program = compiled_gradients(target, prompt, kernels)
    if memory := program.memory_analysis():
        num_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        yield {"planned_gib": num_bytes / GIB}
    ours = our_gradients(program, target, prompt, kernels)
    with Reference(target.hf_dir) as reference:
        theirs = reference.gradients(prompt, ours)
    for tower in ("vision", "text"):
        names = [name for rule in kernels if rule.path.startswith(tower) for name in rule.hf_names if name in ours]
        errors = {name: relative_error(ours[name], theirs[name]) for name in names}
        worst = max(errors, key=lambda name: errors[name])
        yield Measured(f"{tower} tower, worst of {len(errors)} kernels: {worst}", errors[worst], MAX_RELATIVE)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def compiled_gradients(target: Target, prompt: ProcessedPrompt, kernels: Sequence[Rule]) -> jax.stages.Compiled:
    """The program for the kernels' gradients, with the kernels in float32 and all other weights as they are stored."""
    num_tokens = len(prompt.ids)

    def gradients(
        chosen: dict[str, jax.Array], others: dict[str, jax.Array], text: TextBatch, frames: VisionBatch | None
    ) -> dict[str, jax.Array]:
        def objective(chosen: dict[str, jax.Array]) -> jax.Array:
            """The prompt's mean negative log-prob."""
            policy = with_params(abstract_model(target.config, COMPUTE), others | chosen)
            logits = policy(text, frames)[0, : num_tokens - 1]
            following = jnp.asarray(text.tokens)[0, 1:num_tokens]
            return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

        return jax.grad(objective)(chosen)

    params = abstract_params(abstract_model(target.config), stored_dtype(target.hf_dir))
    chosen = {rule.path: jax.ShapeDtypeStruct(params.pop(rule.path).shape, jnp.float32) for rule in kernels}
    sequence = one_sequence(target.config, prompt.ids, **prompt.media)
    with jax.default_matmul_precision("highest"):
        return jax.jit(gradients).lower(chosen, params, *sequence).compile()


def our_gradients(
    program: jax.stages.Compiled, target: Target, prompt: ProcessedPrompt, kernels: Sequence[Rule]
) -> dict[str, np.ndarray]:
    """The kernels' gradients in the first, middle and last layer, by published names."""
    model = load_computing(target.hf_dir, "float32")
    params = flat_params(nnx.state(model, nnx.Param))
    del model
    chosen = {rule.path: params.pop(rule.path).astype(jnp.float32) for rule in kernels}
    jax.block_until_ready(chosen)  # until then, the stored kernels are in memory
    found = program(chosen, params, *one_sequence(target.config, prompt.ids, **prompt.media))
    layers = {rule.path: sorted({0, (rule.count or 1) // 2, (rule.count or 1) - 1}) for rule in kernels}
    return {
        rule.hf_names[layer]: np.array(rule.tensor(found, layer)) for rule in kernels for layer in layers[rule.path]
    }
