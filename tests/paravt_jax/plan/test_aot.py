"""Programs compiled from shapes: the same as a learner's, with all that lies beside them."""

import jax
import pytest
from jax.errors import JaxRuntimeError
from update_programs import compiled_programs, program_bytes

from model_port.sharding import make_mesh
from model_port.tiny import tiny_config
from paravt_jax.bench.mesh_case import config_of, make_learner
from paravt_jax.config import DataConfig, SftConfig
from paravt_jax.learner.settings import LossConfig
from paravt_jax.plan import aot
from paravt_jax.plan.aot import NoRoom, compiled_update
from paravt_jax.plan.batch import BatchShape, abstract_batch, make_batch
from paravt_jax.plan.plan import make_plan

SHAPE = BatchShape(num_rows=2, row_tokens=128, row_actions=24, num_frame_rows=4, row_patches=16, num_parts=2)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(1, 2, 2)


@pytest.fixture(scope="module")
def config():
    return config_of((1, 2, 2), rows=1, row_tokens=128, loss=LossConfig(kl_coef=0.1))


@pytest.fixture(scope="module")
def update(config, mesh):
    return {program.name: program for program in compiled_update(config, tiny_config(), SHAPE, mesh)}


def test_an_abstract_batch_has_the_shapes_of_a_real_one(mesh):
    real, abstract = make_batch(SHAPE, tiny_config()), abstract_batch(SHAPE, tiny_config(), mesh)
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for one, other in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert abstract.text.tokens.sharding.shard_shape((2, 128)) == (1, 128)


@pytest.mark.slow
def test_what_is_compiled_from_shapes_is_what_a_learner_runs(config, mesh, update):
    run = compiled_programs(make_learner(config, tiny_config(), mesh), make_batch(SHAPE, tiny_config()))
    assert set(update) == set(run) == {"encode_vision", "score", "add_gradients", "apply_gradients"}
    own = {name: program.peak_bytes - program.beside_bytes for name, program in update.items()}
    assert own == {name: program_bytes(program) for name, program in run.items()}


@pytest.mark.slow
def test_what_lies_beside_a_program_is_what_it_is_not_given(config, update):
    always = make_plan(config, tiny_config()).memory.resident
    masters, moments = always["masters, float32"], always["Adam moments, float32"]
    counters = 4  # of Adam: its steps
    assert update["add_gradients"].beside_bytes == moments + always["reference"] + counters
    assert update["score"].beside_bytes == 2 * masters + moments + counters  # the masters, and gradients of their size
    assert update["encode_vision"].beside_bytes == masters + moments + always["reference"] + counters


@pytest.mark.slow
def test_devices_send_each_other_what_fsdp_and_tensor_need(update):
    sent = update["add_gradients"].collectives
    assert {each.num_devices for each in sent} >= {2} and sum(each.num_bytes for each in sent) > 0
    assert update["add_gradients"].flops > 3 * update["score"].flops > 0 == update["apply_gradients"].flops


@pytest.mark.slow
def test_imitation_has_neither_reference_nor_moments_of_the_tower(mesh):
    config = SftConfig(data=DataConfig(train="traces.jsonl"))
    names = [program.name for program in compiled_update(config, tiny_config(), SHAPE, mesh)]
    assert names == ["encode_vision", "add_gradients", "apply_gradients"]


def test_a_program_without_room_is_said_with_what_it_needs(monkeypatch):
    def refuse():
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory. Used 120.56G of 95.74G hbm. Exceeded by 24.8G.")

    with pytest.raises(NoRoom, match=r"add_gradients needs 120\.56 of 95\.74 GiB, says the compiler"):
        aot._with_room("add_gradients", refuse)


def test_what_the_compiler_cannot_print_is_unknown():
    class Silent:
        def as_text(self):
            raise JaxRuntimeError("UNIMPLEMENTED")

    assert aot._collectives(Silent()) is None
