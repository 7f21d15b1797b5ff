"""One update of the policy on a mesh: log-probs of the scored tokens, gradients added up over batches, a step of Adam.

Masters and moments are float32, activations what the model computes in. Only what trains has gradients and moments:
with the vision tower frozen its output is computed once per distinct frame of a batch, and shared by policy and
reference. Every sum is over the whole step and divided once, so how a step is cut into batches changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from model_port.inputs import VisionBatch
from model_port.model import Qwen3VL
from model_port.sharding import ACTIVATION_AXES, on_mesh
from model_port.text import Visual
from paravt_jax.learner.losses import LossConfig, LossSums, MismatchSums, kl_penalties, mismatch_sums, policy_loss
from paravt_jax.learner.packing import TrainBatch

LANGUAGE = nnx.PathContains("text")
Schedule = Literal["constant", "cosine"]


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: float = 2e-6
    schedule: Schedule = "constant"  # cosine: down to 0 at the last step
    warmup_frac: float = 0.0  # of the steps, in which the rate rises from 0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    train_vision: bool = False  # the published recipe changes language weights only
    head_chunk_tokens: int = 256  # scored tokens of a row whose logits exist at the same time
    max_bad_steps: int = 5  # updates in a row that are skipped for gradients that are not finite, then the run stops

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be greater than 0")
        for name in ("head_chunk_tokens", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.warmup_frac < 1:
            raise ValueError(f"optim.warmup_frac={self.warmup_frac} must be 0 or more and below 1")

    def rate(self, num_steps: int) -> float | optax.Schedule:
        """The learning rate, for a run of so many steps."""
        rate, num_warmup = self.learning_rate, round(self.warmup_frac * num_steps)
        if self.schedule == "cosine":
            return optax.warmup_cosine_decay_schedule(0.0, rate, num_warmup, max(num_steps, num_warmup + 1))
        return optax.warmup_constant_schedule(0.0, rate, num_warmup) if num_warmup else rate


@flax.struct.dataclass
class TrainState:
    trainable: nnx.State  # float32 masters
    frozen: nnx.State
    opt_state: Any
    step: Int[Any, ""]  # updates, skipped ones included: the policy version
    num_bad: Int[Any, ""]  # updates skipped in a row


class Known(NamedTuple):
    """Log-probs of a batch's scored tokens, where they are known from before the update."""

    prox_logp: Float[Array, "B A"] | None = None
    ref_logp: Float[Array, "B A"] | None = None


class Learner:
    """The compiled programs of one training run, and its state."""

    def __init__(
        self,
        model: Qwen3VL,
        optim: OptimConfig,
        loss: LossConfig,
        *,
        temperature: float,
        num_classes: int,
        num_steps: int = 1,
        mesh: Mesh | None = None,
    ):
        """`temperature` is that of sampling: the engine's log-probs are of the tempered distribution.

        `num_steps` are those of the whole run, for a learning rate that changes.
        """
        self.optim, self.loss, self.mesh = optim, loss, mesh
        self._num_classes = num_classes
        self._graphdef, trainable, frozen = nnx.split(model, nnx.Param if optim.train_vision else LANGUAGE, ...)
        wrong = {leaf.dtype.name for leaf in jax.tree.leaves(trainable)} - {"float32", "float64"}
        if wrong:
            raise ValueError(f"the masters must be float32, got {', '.join(sorted(wrong))}; load the model in float32")
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(optim.max_grad_norm),
            optax.adamw(optim.rate(num_steps), optim.beta1, optim.beta2, optim.eps, weight_decay=optim.weight_decay),
        )
        step, num_bad = (jnp.zeros((), jnp.int32) for _ in range(2))  # two buffers: both are donated
        self.state = TrainState(trainable, frozen, self._make_opt_state(trainable), step, num_bad)
        # The reference is what training began with; without a coefficient there is none.
        self._ref = jax.tree.map(partial(jnp.array, dtype=_ref_dtype(model)), trainable) if loss.kl_coef else None
        self._see = jax.jit(self._see_frames)
        self._logp = jax.jit(partial(self._score, temperature))
        self._add = jax.jit(
            partial(self._add_gradients, temperature), donate_argnums=2, static_argnames=("num_dialogues", "loss")
        )
        self._add_imitation = jax.jit(partial(self._add_imitation_gradients, temperature), donate_argnums=2)
        self._apply = jax.jit(self._update, donate_argnums=0)

    @property
    def model(self) -> Qwen3VL:
        """The policy as it is now. It shares its arrays with the state, which the next update takes back."""
        return nnx.merge(self._graphdef, self.state.trainable, self.state.frozen)

    def update(
        self,
        batches: Sequence[TrainBatch],
        denominator: float,
        num_dialogues: int,
        *,
        known: Sequence[Known] | None = None,
        geometric_mask: bool = False,
    ) -> dict[str, float]:
        """One step over all batches. `denominator` is the N of the loss.

        `known` are the log-probs of the same batches from before, for a second update or KL in the reward; without
        them the policy's are those of this very pass, and the reference's are computed here. `geometric_mask` turns the
        mask of that name on for this step.
        """
        loss = replace(self.loss, geometric_mask=self.loss.geometric_mask or geometric_mask)

        def add(number: int, batch: TrainBatch, grads: nnx.State) -> tuple[nnx.State, Any]:
            before = Known() if known is None else known[number]
            return self._gradients(grads, batch, denominator, num_dialogues, before, loss)

        (sums, mismatch), grad_norm = self._step(batches, add)
        return self._metrics(sums, mismatch, denominator) | self._optim_metrics(grad_norm)

    def imitate(self, batches: Sequence[TrainBatch], denominator: float) -> dict[str, float]:
        """One step of maximum likelihood of the scored tokens, whose number is `denominator`."""

        def add(number: int, batch: TrainBatch, grads: nnx.State) -> tuple[nnx.State, Any]:
            visual = None if self.optim.train_vision else self._shown(batch, self.state.trainable)
            state = self.state
            return self._add_imitation(state.trainable, state.frozen, grads, batch, visual, np.float32(denominator))

        total, grad_norm = self._step(batches, add)
        return {
            "loss/imitation": float(total) / denominator,
            "loss/num_tokens": float(denominator),
            **self._optim_metrics(grad_norm),
        }

    def _step(
        self,
        batches: Sequence[TrainBatch],
        add: Callable[[int, TrainBatch, nnx.State], tuple[nnx.State, Any]],
    ) -> tuple[Any, float]:
        """Gradients of all batches, then one step of the optimizer; what `add` summed up, and the gradient's norm."""
        if not batches:
            raise ValueError("a step needs at least one batch")
        totals = None
        grads = jax.tree.map(jnp.zeros_like, self.state.trainable)
        with on_mesh(self.mesh):
            for number, batch in enumerate(batches):
                grads, sums = add(number, placed(batch, self.mesh), grads)
                totals = sums if totals is None else jax.tree.map(jnp.add, totals, sums)
            self.state, grad_norm = self._apply(self.state, grads)
        return jax.device_get(totals), float(grad_norm)

    def skip(self) -> None:
        """A step that has nothing to learn from: the same weights under the next version."""
        self.state = replace(self.state, step=self.state.step + 1)

    def log_probs(self, batch: TrainBatch) -> np.ndarray:
        """Of the scored tokens, as the policy is now."""
        return np.asarray(self.known(batch, with_ref=False).prox_logp)

    def known(self, batch: TrainBatch, *, with_ref: bool = True) -> Known:
        """The log-probs of the scored tokens before an update: the policy's, and those of the reference if there is."""
        with on_mesh(self.mesh):
            on_devices = placed(batch, self.mesh)
            visual = self._shown(on_devices, self.state.trainable)
            prox_logp = self._logp(self.state.trainable, self.state.frozen, on_devices, visual)
            return Known(prox_logp, self._ref_logp(on_devices, visual) if with_ref else None)

    def kl_penalties(
        self, batches: Sequence[TrainBatch], known: Sequence[Known], num_dialogues: int
    ) -> Float[np.ndarray, " E"]:
        """What KL in the reward takes from each dialogue."""
        total = np.zeros(num_dialogues, np.float64)
        for batch, before in zip(batches, known, strict=True):
            assert before.prox_logp is not None and before.ref_logp is not None, "KL needs both sides"
            total += np.asarray(
                kl_penalties(
                    self.loss,
                    prox_logp=before.prox_logp,
                    ref_logp=before.ref_logp,
                    loss_mask=jnp.asarray(batch.loss_mask),
                    sequence_ids=jnp.asarray(batch.dialogue),
                    num_sequences=num_dialogues,
                )
            )
        return total

    def _gradients(
        self,
        grads: nnx.State,
        batch: TrainBatch,
        denominator: float,
        num_dialogues: int,
        known: Known | None = None,
        loss: LossConfig | None = None,
    ) -> tuple[nnx.State, Any]:
        known = known or Known()
        visual = None if self.optim.train_vision else self._shown(batch, self.state.trainable)
        ref_logp = known.ref_logp if known.ref_logp is not None else self._ref_logp(batch, visual)
        return self._add(
            self.state.trainable,
            self.state.frozen,
            grads,
            batch,
            visual,
            known.prox_logp,
            ref_logp,
            np.float32(denominator),
            num_dialogues=num_dialogues,
            loss=loss or self.loss,
        )

    def _ref_logp(self, batch: TrainBatch, visual: Visual | None) -> Float[Array, "B A"] | None:
        """`visual` is that of the policy, which the reference shares while the vision tower is frozen."""
        if self._ref is None:
            return None
        if self.optim.train_vision:
            visual = self._shown(batch, self._ref)
        return self._logp(self._ref, self.state.frozen, batch, visual)

    def _shown(self, batch: TrainBatch, trainable: nnx.State) -> Visual | None:
        return None if batch.vision is None else self._see(trainable, self.state.frozen, batch.vision)

    def _see_frames(self, trainable: nnx.State, frozen: nnx.State, vision: VisionBatch) -> Visual:
        return nnx.merge(self._graphdef, trainable, frozen).see(vision)

    def _score(
        self, temperature: float, trainable: nnx.State, frozen: nnx.State, batch: TrainBatch, visual: Visual | None
    ) -> Float[Array, "B A"]:
        model = nnx.merge(self._graphdef, trainable, frozen)
        return action_logp(model, batch, visual, temperature, self.optim.head_chunk_tokens)

    def _add_gradients(
        self,
        temperature: float,
        trainable: nnx.State,
        frozen: nnx.State,
        grads: nnx.State,
        batch: TrainBatch,
        visual: Visual | None,
        known_prox_logp: Float[Array, "B A"] | None,
        ref_logp: Float[Array, "B A"] | None,
        denominator: Float[Array, ""],
        *,
        num_dialogues: int,
        loss: LossConfig,
    ) -> tuple[nnx.State, tuple[LossSums, MismatchSums]]:
        def objective(trainable: nnx.State) -> tuple[Float[Array, ""], tuple[LossSums, MismatchSums]]:
            policy_logp = self._policy_logp(temperature, trainable, frozen, batch, visual)
            # In the first update on fresh rollouts, the log-probs from before it are those of this very pass.
            prox_logp = jax.lax.stop_gradient(policy_logp) if known_prox_logp is None else known_prox_logp
            tokens = jax.tree.map(
                jnp.asarray, dict(behavior_logp=batch.behavior_logp, loss_mask=batch.loss_mask, prox_logp=prox_logp)
            )
            sums = policy_loss(
                loss,
                policy_logp=policy_logp,
                advantage=jnp.asarray(batch.advantage),
                ref_logp=ref_logp,
                sequence_ids=jnp.asarray(batch.dialogue),
                num_sequences=num_dialogues,
                **tokens,
            )
            mismatch = mismatch_sums(
                token_class=jnp.asarray(batch.token_class), num_classes=self._num_classes, **tokens
            )
            return sums.loss / denominator, (sums, mismatch)

        own, sums = jax.grad(objective, has_aux=True)(trainable)
        return jax.tree.map(jnp.add, grads, own), sums

    def _add_imitation_gradients(
        self,
        temperature: float,
        trainable: nnx.State,
        frozen: nnx.State,
        grads: nnx.State,
        batch: TrainBatch,
        visual: Visual | None,
        denominator: Float[Array, ""],
    ) -> tuple[nnx.State, Float[Array, ""]]:
        def objective(trainable: nnx.State) -> tuple[Float[Array, ""], Float[Array, ""]]:
            policy_logp = self._policy_logp(temperature, trainable, frozen, batch, visual)
            total = -jnp.where(jnp.asarray(batch.loss_mask), policy_logp, 0.0).sum()
            return total / denominator, total

        own, total = jax.grad(objective, has_aux=True)(trainable)
        return jax.tree.map(jnp.add, grads, own), total

    def _policy_logp(
        self, temperature: float, trainable: nnx.State, frozen: nnx.State, batch: TrainBatch, visual: Visual | None
    ) -> Float[Array, "B A"]:
        """`visual` is None where frames are seen within the gradient, or where there are none."""
        if visual is None and batch.vision is not None:
            visual = self._see_frames(trainable, frozen, batch.vision)
        return self._score(temperature, trainable, frozen, batch, visual)

    def _update(self, state: TrainState, grads: nnx.State) -> tuple[TrainState, Float[Array, ""]]:
        """Skips an update whose gradients are not finite: one bad token must not end a policy."""
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)

        def if_finite(new: Any, old: Any) -> Any:
            return jax.tree.map(partial(jnp.where, finite), new, old)

        state = replace(
            state,
            trainable=if_finite(trainable, state.trainable),
            opt_state=if_finite(opt_state, state.opt_state),
            step=state.step + 1,
            num_bad=jnp.where(finite, 0, state.num_bad + 1),
        )
        return state, grad_norm

    def _optim_metrics(self, grad_norm: float) -> dict[str, float]:
        num_bad = int(self.state.num_bad)
        if num_bad >= self.optim.max_bad_steps:
            raise RuntimeError(
                f"gradients were not finite in {num_bad} updates in a row (optim.max_bad_steps); the weights are those "
                f"of step {int(self.state.step) - num_bad}"
            )
        return {"optim/grad_norm": grad_norm, "optim/num_bad_steps": float(num_bad)}

    def _metrics(self, sums: LossSums, mismatch: MismatchSums, denominator: float) -> dict[str, float]:
        num_tokens = max(float(sums.num_tokens), 1.0)
        metrics = {
            "loss/total": float(sums.loss) / denominator,
            "loss/policy": float(sums.policy) / denominator,
            "loss/kl_ref": float(sums.kl_ref) / num_tokens,
            "loss/clip_frac": float(sums.num_clipped) / num_tokens,
            "loss/capped_frac": float(sums.num_capped) / num_tokens,
            "loss/geometric_masked_frac": float(sums.num_geometric_masked) / num_tokens,
            "loss/num_tokens": float(sums.num_tokens),
            "mismatch/behavior_kl": float(sums.behavior_kl) / num_tokens,
        }
        for number, count in enumerate(mismatch.num_tokens.tolist()):
            metrics[f"mismatch/behavior_kl_class_{number}"] = float(mismatch.behavior_kl[number]) / max(count, 1.0)
        return metrics

    def _make_opt_state(self, trainable: nnx.State) -> Any:
        """Moments lie where their parameters lie, from the beginning."""
        if self.mesh is None:
            return self._optimizer.init(trainable)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        shardings = optax.tree_map_params(
            self._optimizer,
            lambda _, param: param.sharding,
            jax.eval_shape(self._optimizer.init, trainable),
            trainable,
            transform_non_params=lambda _: everywhere,
        )
        return jax.jit(self._optimizer.init, out_shardings=shardings)(trainable)


def _ref_dtype(model: Qwen3VL) -> Any:
    """The reference never changes, so it needs no masters."""
    return jnp.dtype(model.compute.dtype)


def action_logp(
    model: Qwen3VL, batch: TrainBatch, visual: Visual | None, temperature: float, chunk_tokens: int
) -> Float[Array, "B A"]:
    """Log-probs of the scored tokens under log_softmax(z / temperature), a chunk of logits at a time."""
    hidden = model.hidden(batch.text, visual)
    source, target = jnp.asarray(batch.source), jnp.asarray(batch.target)
    chosen = jnp.take_along_axis(hidden, source[..., None], axis=1)
    num_rows, num_actions, width = chosen.shape
    num_chunks = -(-num_actions // min(chunk_tokens, num_actions))
    missing = -num_actions % num_chunks
    chosen = jnp.pad(chosen, ((0, 0), (0, missing), (0, 0))).reshape(num_rows, num_chunks, -1, width)
    target = jnp.pad(target, ((0, 0), (0, missing))).reshape(num_rows, num_chunks, -1)

    @jax.checkpoint
    def score(chunk: tuple[Float[Array, "B c D"], Int[Array, "B c"]]) -> Float[Array, "B c"]:
        hidden, target = chunk
        logits = model.text.logits(hidden) / temperature
        picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return picked - jax.nn.logsumexp(logits, axis=-1)

    logp = jax.lax.map(score, (jnp.moveaxis(chosen, 1, 0), jnp.moveaxis(target, 1, 0)))
    return jnp.moveaxis(logp, 0, 1).reshape(num_rows, -1)[:, :num_actions]


def placed(batch: TrainBatch, mesh: Mesh | None) -> TrainBatch:
    """The batch on its devices, rows split over the axes that batches split over where they divide."""
    if mesh is None:
        return jax.device_put(batch)
    axes = ACTIVATION_AXES["b"]
    assert isinstance(axes, tuple)
    num_parts = int(np.prod([mesh.shape[axis] for axis in axes]))

    def place(array: np.ndarray) -> jax.Array:
        spec = PartitionSpec(axes) if array.shape[0] % num_parts == 0 else PartitionSpec()
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(place, batch)
