"""Programs compiled from shapes: they equal the learner's, and resident arrays are counted."""

import jax
import pytest
from jax.errors import JaxRuntimeError
from update_programs import compiled_programs, program_bytes

from model_port.sharding import make_mesh
from model_port.tiny import tiny_config
from paravt_jax.bench.mesh_case import config_of, make_learner
from paravt_jax.config import DataConfig, SftConfig, TrainConfig
from paravt_jax.learner.batch_shape import abstract_batch, make_batch
from paravt_jax.learner.packing import BatchShape
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.plan import aot
from paravt_jax.plan.aot import NoRoom, compiled_update
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.memory import memory_of
from paravt_jax.plan.meshes import estimate
from paravt_jax.plan.run import PlannedRl, PlannedSft
from paravt_jax.plan.workload import batch_flops, full_step

SHAPE = BatchShape(num_rows=2, row_tokens=128, row_actions=24, num_frame_rows=4, row_patches=16, num_parts=2)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(1, 2, 2)


@pytest.fixture(scope="module")
def update():
    config = config_of((1, 2, 2), rows=1, row_tokens=128, loss=LossConfig(kl_coef=0.1))
    return PlannedRl.of(config, tiny_config()).update


@pytest.fixture(scope="module")
def compiled(update, mesh):
    return {program.name: program for program in compiled_update(update, tiny_config(), SHAPE, mesh)}


def test_an_abstract_batch_has_the_shapes_of_a_real_one(mesh):
    real, abstract = make_batch(SHAPE, tiny_config()), abstract_batch(SHAPE, tiny_config(), mesh)
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)] for batch in (real, abstract)]
    assert shapes[0] == shapes[1]
    assert abstract.text.tokens.sharding.shard_shape((2, 128)) == (1, 128)


@pytest.mark.slow
def test_programs_compiled_from_shapes_equal_the_learners(update, mesh, compiled):
    learners = compiled_programs(make_learner(update, tiny_config(), mesh), make_batch(SHAPE, tiny_config()))
    assert set(compiled) == set(learners) == {"encode_vision", "score", "gradients", "apply_gradients"}
    num_bytes = {name: program.peak_bytes - program.beside_bytes for name, program in compiled.items()}
    assert num_bytes == {name: program_bytes(program) for name, program in learners.items()}


@pytest.mark.slow
def test_resident_arrays_that_are_no_argument_count_beside_a_program(update, compiled):
    resident = memory_of(update, tiny_config(), SHAPE, None, "cpu").resident
    masters, reference = resident["masters, float32"], resident["reference"]
    moments = resident["Adam moments, float32"] + 4  # and Adam's step counter
    assert compiled["gradients"].beside_bytes == masters + moments + reference
    assert compiled["score"].beside_bytes == 2 * masters + moments  # gradients have the size of the masters
    assert compiled["encode_vision"].beside_bytes == masters + moments + reference


@pytest.mark.slow
def test_a_compiled_program_has_flops_and_collectives(compiled):
    collectives = compiled["gradients"].collectives
    assert {each.num_devices for each in collectives} >= {2} and sum(each.num_bytes for each in collectives) > 0
    assert compiled["gradients"].flops > 3 * compiled["score"].flops > 0 == compiled["apply_gradients"].flops


@pytest.mark.slow
def test_a_cold_start_computes_no_log_probs_of_a_reference(mesh):
    update = PlannedSft.of(SftConfig(data=DataConfig(train="traces.jsonl")), tiny_config()).update
    names = [program.name for program in compiled_update(update, tiny_config(), SHAPE, mesh)]
    assert names == ["encode_vision", "gradients", "apply_gradients"]


@pytest.mark.slow
def test_a_trained_vision_tower_without_scores_has_no_program_of_its_own():
    optim = OptimConfig(train_vision=True)
    run = PlannedRl.of(config_of((1, 1, 1), rows=1, row_tokens=128, optim=optim), tiny_config())
    step = full_step(run.largest_batch())
    compiled = estimate(run, step, DEVICES["cpu"], jax.devices()[:1]).compiled_flops
    assert compiled == pytest.approx(sum(batch_flops(run.update, run.model, step.shape, "cpu").values()), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "num_encoded"), [(True, 1), (False, 2)])
def test_the_frames_are_encoded_for_old_log_probs_and_again_for_the_gradients(mesh, trained, num_encoded, monkeypatch):
    """A trained vision tower runs inside the gradients. Both encodings are one program, which is parsed once."""
    parsed, parse = [], aot.collectives_of
    monkeypatch.setattr(aot, "collectives_of", lambda text, *hosts: parsed.append(text) or parse(text, *hosts))
    train = TrainConfig(prompts_per_step=4, group_size=2, updates_per_step=2)
    config = config_of((1, 2, 2), rows=1, row_tokens=128, optim=OptimConfig(train_vision=trained), train=train)
    programs = compiled_update(PlannedRl.of(config, tiny_config()).update, tiny_config(), SHAPE, mesh)
    names = [*["encode_vision"] * num_encoded, "gradients", "score", "apply_gradients"]
    assert [program.name for program in programs] == names
    assert len(parsed) == len(set(names))


def test_an_out_of_memory_error_of_the_compiler_has_the_sizes():
    def out_of_memory():
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory. Used 120.56G of 95.74G hbm. Exceeded by 24.8G.")

    with pytest.raises(NoRoom, match=r"gradients needs 120\.56 of 95\.74 GiB, according to the compiler"):
        aot._with_room("gradients", out_of_memory)


def test_collectives_are_unknown_if_the_compiler_cannot_print_them():
    class Unprintable:
        def as_text(self):
            raise JaxRuntimeError("UNIMPLEMENTED")

    assert aot._collectives(Unprintable(), 8) is None
