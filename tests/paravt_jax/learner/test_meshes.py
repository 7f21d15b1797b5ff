"""The collectives of a compiled update: devices exchange only the necessary arrays."""

import re
from typing import NamedTuple

import jax
import pytest
from update_programs import compiled_programs

from model_port.config import ModelConfig, TextConfig
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.sharding import make_mesh, on_mesh
from paravt_jax.bench.mesh_case import config_of, make_learner
from paravt_jax.learner import programs
from paravt_jax.learner.batch_shape import make_batch
from paravt_jax.learner.objectives import imitation
from paravt_jax.learner.packing import BatchShape
from paravt_jax.plan.run import PlannedRl

pytestmark = pytest.mark.slow

# Sizes that identify an array in a program.
WIDTH, VOCAB, LAYERS, ROW_TOKENS, TABLE_ROWS = 64, 1028, 3, 136, 33
BLOCK = 320  # of VOCAB
CONFIG = ModelConfig(
    TextConfig(LAYERS, WIDTH, 96, 4, 4, head_dim=16, vocab_size=VOCAB, mrope_sections=(4, 2, 2)),
    Qwen3VisionConfig(2, 32, 48, 4, WIDTH, (0,), num_positions=49, patch_px=4),
    tie_embeddings=False,
    image_token_id=1020,
    video_token_id=1021,
    vision_start_token_id=1022,
    vision_end_token_id=1023,
)
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


class Exchange(NamedTuple):
    kind: str
    sizes: frozenset[int]  # of all axes
    in_loop: bool


def collectives(program: str) -> list[Exchange]:
    loops, entry = program.split("\nENTRY ")
    return [
        Exchange(kind, frozenset(map(int, re.findall(r"(?<=[\[,])\d+(?=[\],])", shapes))), in_loop)
        for part, in_loop in ((loops, True), (entry, False))
        for shapes, kind in COLLECTIVE.findall(part)
    ]


def programs_on(shape: tuple[int, int, int]) -> dict[str, str]:
    """The compiled programs of an update whose head has four blocks."""
    config = config_of(shape, rows=1, row_tokens=ROW_TOKENS)
    parts = config.mesh.num_row_parts
    batch = make_batch(BatchShape(parts, ROW_TOKENS, 4 * TABLE_ROWS // 3, parts, 96, 3 * parts), CONFIG)
    learner = make_learner(PlannedRl.of(config, CONFIG).update, CONFIG, make_mesh(*shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paravt_jax.learner.head.WHOLE_TOKENS", 24)
        return {name: program.as_text() for name, program in compiled_programs(learner, batch).items()}


@pytest.fixture(scope="module")
def over_fsdp():
    return programs_on((1, 4, 1))


def test_devices_exchange_the_head_and_its_gradient_by_blocks(over_fsdp):
    assert f"[{VOCAB},{WIDTH}]" not in over_fsdp["gradients"]
    of_blocks = [each for each in collectives(over_fsdp["gradients"]) if BLOCK in each.sizes]
    assert all(each.in_loop for each in of_blocks)
    kinds = [each.kind for each in of_blocks]
    assert kinds.count("all-gather") == 2 and kinds.count("reduce-scatter") == 1


def test_frames_stay_on_the_devices_of_their_rows(over_fsdp):
    of_tables = {TABLE_ROWS, 4 * TABLE_ROWS}
    for name in ("encode_vision", "gradients"):
        assert not [each for each in collectives(over_fsdp[name]) if each.sizes & of_tables]


def test_residuals_of_long_rows_are_sharded_over_tensor(monkeypatch):
    monkeypatch.setattr("model_port.text.LONG_ROW_TOKENS", ROW_TOKENS - 1)
    program = programs_on((1, 1, 2))["gradients"]
    assert f"f32[{LAYERS},1,{ROW_TOKENS // 2},{WIDTH}]" in program
    assert f"f32[{LAYERS},1,{ROW_TOKENS},{WIDTH}]" not in program


def test_gradients_are_sharded_like_their_parameters():
    run = PlannedRl.of(config_of((1, 2, 2), rows=1, row_tokens=64), CONFIG)
    learner = make_learner(run.update, CONFIG, make_mesh(1, 2, 2))
    batch = make_batch(BatchShape(2, 64, 16, 2, 16, 2), CONFIG)
    with on_mesh(learner.mesh):
        grads, _ = learner._gradients(batch, imitation, lambda *_: 1.0)
    for own, param in zip(jax.tree.leaves(grads), jax.tree.leaves(learner.state.trainable), strict=True):
        assert own.sharding.is_equivalent_to(param.sharding, param.ndim)


def test_batches_of_a_step_share_programs_and_add_up_in_place():
    learner = make_learner(PlannedRl.of(config_of((1, 1, 1), rows=1, row_tokens=64), CONFIG).update, CONFIG, None)
    batch = make_batch(BatchShape(1, 64, 16, 1, 16, 2), CONFIG)
    sizes = [program._cache_size() for program in (programs.gradients, programs.add)]
    learner.imitate([batch, batch, batch], 48.0)
    assert [program._cache_size() for program in (programs.gradients, programs.add)] == [size + 1 for size in sizes]
    grads = learner.state.trainable
    memory = programs.add.lower(grads, grads).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(grads))
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 100
