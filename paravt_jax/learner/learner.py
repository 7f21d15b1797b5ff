"""The learner: its state on a mesh, and the host's part of an update. programs.py has the compiled part.

Master weights and moments are float32; activations have the model's compute dtype. Moments and reference can be
offloaded to host memory. Only trained parameters have gradients and moments. A frozen vision tower encodes each
distinct frame of a batch once, for policy and reference. With adapters (model_port/lora.py), all other weights are
frozen and shared, and the reference is a copy of the adapters. Losses are summed over the whole step and divided once,
so the split into batches does not change the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from model_port.compiling import compiling
from model_port.model import VLModel
from model_port.sharding import ACTIVATION_AXES, num_row_parts, on_mesh, own_rows, shapes_of
from model_port.text import Visual
from paravt_jax.learner import programs
from paravt_jax.learner.advantages import kl_sums, kl_to_go
from paravt_jax.learner.ahead import UpdateCompiler
from paravt_jax.learner.credit import CLASSES
from paravt_jax.learner.losses import LossCoefs, ratio_quantile
from paravt_jax.learner.objectives import (
    Objective,
    OldLogProbs,
    PolicyInputs,
    PolicyObjective,
    PolicySums,
    imitation,
    variant_of,
)
from paravt_jax.learner.optim import numbers_at, optimizer
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.programs import Params, TrainState
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts

LANGUAGE = nnx.PathContains("text")
MAX_BAD_STEPS = 5  # consecutive skipped updates (non-finite gradients) before the run stops
DEVICE_MEMORY, HOST_MEMORY = "device", "pinned_host"  # jax's names


@dataclass(frozen=True, eq=False)
class StepPart:
    """The data for an optimizer step. Without batches the step only raises the policy version.

    `old` has the log-probs of each batch from before the step, for later parts of a step and for KL in the reward.
    Without `old`, the update's own forward pass gives prox, and the update computes the reference.
    """

    batches: Sequence[TrainBatch]
    counts: StepCounts
    old: Sequence[OldLogProbs] | None = None


class Learner:
    """The policy in training: weights, optimizer and reference on a mesh, and their updates."""

    def __init__(
        self,
        model: VLModel,
        optim: OptimConfig,
        loss: LossConfig,
        *,
        temperature: float,
        num_steps: int = 1,
        mesh: Mesh | None = None,
    ):
        """Sets up the state from the model's arrays, which the first update invalidates (donation).

        Trained weights must be float32. `temperature` is the sampler's, because its log-probs include the temperature.
        `num_steps` is the number of optimizer steps of the whole run, for the learning-rate schedule.
        """
        self.optim, self.loss, self.mesh = optim, loss, mesh
        self._variant, self._coefs = variant_of(loss), LossCoefs.of(loss)
        self._temperature, self.num_steps = temperature, num_steps
        self._structure, trainable, frozen = nnx.split(model, trained_filter(model, optim), ...)
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(trainable)} - {"float32", "float64"}
        if dtypes:
            raise ValueError(f"the masters must be float32, got {', '.join(sorted(dtypes))}; load the model in float32")
        step, num_bad = (self._new_counter() for _ in range(2))  # two buffers: both are donated
        self.state = TrainState(trainable, frozen, self._make_opt_state(trainable), step, num_bad)
        self._move_moments(HOST_MEMORY)
        # The reference is the initial policy, in the compute dtype because it never changes; without a KL term: None.
        ref_dtype = jnp.dtype(model.compute.dtype)
        ref = jax.tree.map(partial(jnp.array, dtype=ref_dtype), trainable) if loss.kl_coef else None
        self._ref = in_memory(ref, HOST_MEMORY) if optim.offload else ref

    @property
    def model(self) -> VLModel:
        """The current policy. It shares its arrays with the state, so the next update invalidates it (donation)."""
        return nnx.merge(self._structure, *self.state.params)

    def update_compiler(self, num_dialogues: int, *, scores_before: bool) -> UpdateCompiler:
        """A compiler for the programs of `update` with the current shapes."""
        return self._compiler(
            PolicyObjective.of(self.loss, self._variant, num_dialogues),
            self._coefs,
            scores_before=scores_before,
        )

    def imitation_compiler(self) -> UpdateCompiler:
        return self._compiler(imitation, None, scores_before=False)

    def _compiler(self, objective: Objective, coefs: LossCoefs | None, **options: Any) -> UpdateCompiler:
        memory = DEVICE_MEMORY if self.optim.offload else None
        state = replace(shapes_of(self.state), opt_state=shapes_of(self.state.opt_state, memory))
        return UpdateCompiler(
            self._structure,
            state,
            None if self._ref is None else Params(shapes_of(self._ref, memory), state.frozen),
            self._temperature,
            numbers_at(self.optim, 0, self.num_steps),
            objective,
            coefs,
            train_vision=self.optim.train_vision,
            mesh=self.mesh,
            **options,
        )

    def update(self, parts: Sequence[StepPart], num_dialogues: int) -> dict[str, float]:
        """Takes an RL step: one optimizer step per part. Returns the metrics of all parts.

        At least one part has batches. `num_dialogues` bounds the dialogues of a part. Raises RuntimeError after
        MAX_BAD_STEPS updates in a row with gradients that are not finite.
        """
        objective = PolicyObjective.of(self.loss, self._variant, num_dialogues)
        reports = []
        for part in parts:
            if part.batches:
                reports.append(self._update(part, objective))
            else:
                self.skip()
        sums, norms = (list(each) for each in zip(*reports, strict=True))
        total, expert_tokens = jax.tree.map(lambda *values: sum(values), *sums)
        metrics = _policy_metrics(total, len(sums)) | _expert_metrics(expert_tokens)
        return metrics | self._optim_metrics(float(np.mean(norms)))

    def _update(self, part: StepPart, objective: PolicyObjective) -> tuple[Any, float]:
        def inputs(number: int, batch: TrainBatch, visual: Visual | None) -> PolicyInputs:
            old = OldLogProbs(ref_logp=self._ref_logp(batch, visual)) if part.old is None else part.old[number]
            return PolicyInputs(self._coefs, part.counts, old)

        return self._step(part.batches, objective, inputs)

    def imitate(self, batches: Sequence[TrainBatch], denominator: float) -> dict[str, float]:
        """Takes one maximum-likelihood step on the scored tokens; `denominator` is their number."""
        (total, expert_tokens), grad_norm = self._step(batches, imitation, lambda *_: denominator)
        metrics = {"loss/imitation": float(total) / denominator, "loss/num_tokens": float(denominator)}
        return metrics | _expert_metrics(expert_tokens) | self._optim_metrics(grad_norm)

    def skip(self) -> None:
        """Counts a step without data: raises the policy version and keeps the weights."""
        self.state = replace(self.state, step=self.state.step + 1)

    def log_probs(self, batch: TrainBatch) -> np.ndarray:
        """Log-probs of the scored tokens under the current policy."""
        with on_mesh(self.mesh):
            batch = on_devices(batch, self.mesh)
            return own_rows(self._score(self.state.params, batch, self._encode_vision(self.state.params, batch)))

    def old_log_probs(self, batch: TrainBatch) -> OldLogProbs:
        """Log-probs of the scored tokens under the current policy, and under the reference if there is one."""
        with on_mesh(self.mesh):
            batch = on_devices(batch, self.mesh)
            visual = self._encode_vision(self.state.params, batch)
            return OldLogProbs(self._score(self.state.params, batch, visual), self._ref_logp(batch, visual))

    def kl_penalties(self, part: StepPart, num_dialogues: int) -> Float[np.ndarray, " E"]:
        """kl_coef times the summed KL of each of this host's dialogues, for KL in the reward; needs `part.old`.

        The estimator is k1, the log-ratio, which has no bias; in a loss its expected gradient would be 0.
        """
        assert part.old is not None, "the penalty needs log-probs from before the update"
        total = np.zeros(num_dialogues)
        for batch, old in zip(part.batches, part.old, strict=True):
            assert old.prox_logp is not None and old.ref_logp is not None
            kl = own_rows(old.prox_logp) - own_rows(old.ref_logp)
            total += kl_sums(kl, batch.loss_mask, batch.dialogue, num_dialogues)
        return self.loss.kl_coef * total

    def kl_to_go(self, batch: TrainBatch, old: OldLogProbs) -> Float[np.ndarray, "B A"]:
        """For each scored token of this host, kl_coef times the KL summed from this token to the end of its dialogue.

        As in the release, the KL compares the sampler's log-probs with the reference, as if engine and learner agreed.
        """
        assert old.ref_logp is not None, "the KL needs the reference"
        kl = batch.behavior_logp - own_rows(old.ref_logp)
        return self.loss.kl_coef * kl_to_go(kl, batch.loss_mask, batch.dialogue)

    def _step(
        self,
        batches: Sequence[TrainBatch],
        objective: Objective,
        inputs: Callable[[int, TrainBatch, Visual | None], Any],
    ) -> tuple[Any, float]:
        """Adds up the gradients of all batches, then takes one optimizer step.

        Returns the summed reports of the objective and token counts of experts, and the gradient norm.
        """
        rows, tokens = batches[0].text.tokens.shape
        with on_mesh(self.mesh), compiling(f"update ({rows} x {tokens} tokens)"):
            total = self._gradients(batches[0], objective, partial(inputs, 0))
            for number, batch in enumerate(batches[1:], 1):
                total = programs.add(total, self._gradients(batch, objective, partial(inputs, number)))
            grads, sums = total
            step, frozen = int(self.state.step), self.state.frozen
            self._move_moments(DEVICE_MEMORY)
            state, grad_norm = programs.apply_gradients(
                replace(self.state, frozen=nnx.State({})), grads, numbers_at(self.optim, step, self.num_steps)
            )
            self.state = replace(state, frozen=frozen)  # keeps the same arrays, because other code may refer to them
            self._move_moments(HOST_MEMORY)
        self._check_gradients()
        return jax.device_get(sums), float(grad_norm)

    def _gradients(
        self, host_batch: TrainBatch, objective: Objective, inputs: Callable[[TrainBatch, Visual | None], Any]
    ) -> tuple[nnx.State, Any]:
        batch = on_devices(host_batch, self.mesh)
        # A trained vision tower runs inside the gradient.
        visual = None if self.optim.train_vision else self._encode_vision(self.state.params, batch)
        return programs.gradients(
            self._structure,
            self.state.params,
            batch,
            visual,
            self._temperature,
            inputs(batch, visual),
            objective=objective,
        )

    def _move_moments(self, memory: str) -> None:
        """With `optim.offload`, moves the moments onto the devices for an optimizer step, and back."""
        if self.optim.offload:
            self.state = replace(self.state, opt_state=in_memory(self.state.opt_state, memory))

    def _encode_vision(self, params: Params, batch: TrainBatch) -> Visual | None:
        return None if batch.vision is None else programs.encode_vision(self._structure, params, batch.vision)

    def _score(self, params: Params, batch: TrainBatch, visual: Visual | None) -> Float[Array, "B A"]:
        return programs.score(self._structure, params, batch, visual, self._temperature)

    def _ref_logp(self, batch: TrainBatch, visual: Visual | None) -> Float[Array, "B A"] | None:
        """Reference log-probs. `visual` is the policy's vision output, shared if the tower is frozen."""
        if self._ref is None:
            return None
        weights = in_memory(self._ref, DEVICE_MEMORY) if self.optim.offload else self._ref
        ref = Params(weights, self.state.frozen)
        return self._score(ref, batch, self._encode_vision(ref, batch) if self.optim.train_vision else visual)

    def _check_gradients(self) -> None:
        num_bad = int(self.state.num_bad)
        if num_bad >= MAX_BAD_STEPS:
            raise RuntimeError(
                f"gradients were not finite in {num_bad} updates in a row; the weights are from step "
                f"{int(self.state.step) - num_bad}"
            )

    def _optim_metrics(self, grad_norm: float) -> dict[str, float]:
        last = numbers_at(self.optim, int(self.state.step) - 1, self.num_steps)
        return {
            "optim/grad_norm": grad_norm,
            "optim/learning_rate": float(last.learning_rate),
            "optim/num_bad_steps": float(self.state.num_bad),
        }

    def _new_counter(self) -> Int[Array, ""]:
        """A counter with the sharding of later steps; any other would make the second step recompile its programs."""
        zero = jnp.zeros((), jnp.int32)
        return zero if self.mesh is None else jax.device_put(zero, NamedSharding(self.mesh, PartitionSpec()))

    def _make_opt_state(self, trainable: nnx.State) -> Any:
        """Makes the optimizer state; moments have the sharding of their parameters."""
        adam = optimizer(numbers_at(self.optim, 0, self.num_steps))
        if self.mesh is None:
            return adam.init(trainable)
        return jax.jit(adam.init, out_shardings=opt_shardings(adam, trainable, self.mesh))(trainable)


def in_memory(tree: Any, memory: str) -> Any:
    """Moves the arrays of a tree to another memory kind of their devices."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(memory)), tree)


def opt_shardings(adam: optax.GradientTransformation, trainable: nnx.State, mesh: Mesh) -> Any:
    """Shardings of the optimizer state: moments like their parameters, scalars replicated."""
    replicated = NamedSharding(mesh, PartitionSpec())
    return optax.tree_map_params(
        adam.init,
        lambda _, param: param.sharding,
        jax.eval_shape(adam.init, trainable),
        trainable,
        transform_non_params=lambda _: replicated,
    )


def trained_filter(model: VLModel, optim: OptimConfig) -> Any:
    """The filter of trained parameters: the adapters if there are any, else the weights, by default of the text."""
    if model.lora.rank:
        return nnx.LoRAParam
    return nnx.Param if optim.train_vision else LANGUAGE


def _policy_metrics(sums: PolicySums, num_updates: int) -> dict[str, float]:
    loss, by_class = sums.loss, sums.by_class
    num_tokens = max(float(loss.num_tokens), 1.0)
    metrics = {
        "loss/total": float(loss.loss) / num_updates,
        "loss/policy": float(loss.policy) / num_updates,
        "loss/kl_ref": float(loss.kl_ref) / num_tokens,
        "loss/clip_frac": float(loss.num_clipped_low + loss.num_clipped_high) / num_tokens,
        "loss/clip_low_frac": float(loss.num_clipped_low) / num_tokens,
        "loss/clip_high_frac": float(loss.num_clipped_high) / num_tokens,
        "loss/ratio_p01": ratio_quantile(np.asarray(sums.ratio_counts), 0.01),
        "loss/ratio_p99": ratio_quantile(np.asarray(sums.ratio_counts), 0.99),
        "loss/capped_frac": float(loss.num_capped) / num_tokens,
        "loss/num_tokens": float(loss.num_tokens),
        "loss/entropy": float(by_class.entropy.sum()) / num_tokens,
        "mismatch/behavior_kl": float(loss.behavior_kl) / num_tokens,
    }
    for name, count, kl, entropy in zip(
        CLASSES, by_class.num_tokens, by_class.behavior_kl, by_class.entropy, strict=True
    ):
        metrics[f"mismatch/behavior_kl_{name}"] = float(kl) / max(float(count), 1.0)
        if count:
            metrics[f"loss/entropy_{name}"] = float(entropy) / float(count)
    return metrics


def _expert_metrics(expert_tokens: Int[np.ndarray, "L X"] | None) -> dict[str, float]:
    """The largest load of an expert relative to its layer's mean, and the number of experts without tokens."""
    if expert_tokens is None:
        return {}
    mean = np.maximum(expert_tokens.mean(axis=1, keepdims=True), 1e-9)
    return {
        "moe/expert_load_max": float((expert_tokens / mean).max()),
        "moe/dead_experts": float((expert_tokens == 0).sum()),
    }


def on_devices(batch: TrainBatch, mesh: Mesh | None) -> TrainBatch:
    """Moves a batch to its devices. With several hosts, each host contributes its own rows."""
    if mesh is None:
        return jax.device_put(batch)
    num_hosts, num_parts = jax.process_count(), num_row_parts(mesh)
    num_rows = len(batch.target) * num_hosts
    if num_rows % num_parts:
        raise ValueError(f"a batch of {num_rows} rows does not split over mesh.data x mesh.fsdp = {num_parts}")
    if batch.vision is not None:
        batch = replace(batch, vision=replace(batch.vision, num_parts=batch.vision.num_parts * num_hosts))

    def from_hosts(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(row_sharding(len(rows) * num_hosts, mesh), rows)

    return jax.tree.map(from_hosts, batch)


def row_sharding(num_rows: int, mesh: Mesh) -> NamedSharding:
    """Rows are sharded over the batch axes, or replicated if they do not divide (frames packed for another mesh)."""
    divides = num_rows % num_row_parts(mesh) == 0
    return NamedSharding(mesh, PartitionSpec(ACTIVATION_AXES["b"]) if divides else PartitionSpec())
