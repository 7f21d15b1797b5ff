"""The compiled programs of an update, their memory, and the plan's estimate of the largest."""

from collections.abc import Callable
from typing import Any

import jax

from paravt_jax.learner import programs
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.variants import StepCounts
from paravt_jax.plan.plan import Plan

PROGRAM_PHASES = ("backward pass, a layer", "backward pass, the head")  # the plan's phases of the largest program


def compiled_programs(learner: Learner, batch: TrainBatch) -> dict[str, Any]:
    """Runs an update and returns its programs by their names in learner.programs."""
    compiled: dict[str, Any] = {}

    def watched(name: str, function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            compiled[name] = function.lower(*args, **kwargs).compile()
            return function(*args, **kwargs)

        return call

    functions = {name: value for name, value in vars(programs).items() if isinstance(value, jax.stages.Wrapped)}
    for name, function in functions.items():
        setattr(programs, name, watched(name, function))
    try:
        learner.update([StepPart([batch], StepCounts(1.0, 1.0, 1.0))], len(batch.text.tokens))
    finally:
        for name, function in functions.items():
            setattr(programs, name, function)
    return compiled


def program_bytes(program: Any) -> int:
    """Returns a compiled program's peak bytes on a device, including its arguments."""
    memory = program.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def planned_program_bytes(plan: Plan) -> int:
    """Returns the plan's estimate for the largest program, without moments and gradients of earlier batches."""
    sizes, parts = plan.memory.phase_bytes, plan.memory.phases
    phases = [sizes[name] - parts[name]["gradients of the step"] for name in parts if name in PROGRAM_PHASES]
    resident = plan.memory.resident
    return resident["masters, float32"] + resident.get("frozen weights", 0) + max(phases)
