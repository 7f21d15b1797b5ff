"""Every parameter of the full-size models can be sharded on every supported mesh, checked on shapes."""

import math
from dataclasses import dataclass
from itertools import product

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import model_port
from model_port import sharding
from model_port.config import PRESETS
from model_port.loading import abstract_model, abstract_params
from model_port.weights import check_param_paths, rules


@pytest.mark.parametrize("name", PRESETS)
def test_the_weight_table_and_the_model_name_the_same_parameters(name):
    config = PRESETS[name]
    params = abstract_params(abstract_model(config), "bfloat16")
    check_param_paths(config, set(params))
    for rule in rules(config):
        assert math.prod(params[rule.path].shape) == math.prod(rule.hf_shape) * (rule.count or 1), rule.path


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_divides_on_meshes_up_to_64_and_the_key_value_heads(name):
    params = abstract_params(abstract_model(PRESETS[name]), "bfloat16")
    for fsdp, tensor in ((1, 4), (8, 8), (64, 8)):
        sizes = dict(data=1, fsdp=fsdp, tensor=min(tensor, PRESETS[name].text.num_kv_heads))
        for path, leaf in params.items():
            sharding.check_divisible(path, leaf.shape, sharding.param_spec(path, len(leaf.shape)), sizes)


def test_only_small_vectors_are_replicated():
    """Replicated parameters are less than a thousandth of the 8B."""
    params = abstract_params(abstract_model(PRESETS["8b"]), "bfloat16")
    specs = {path: sharding.param_spec(path, p.ndim) for path, p in params.items()}
    whole = {path: math.prod(params[path].shape) for path, spec in specs.items() if spec == PartitionSpec()}
    assert all(path.endswith(("scale", "bias")) for path in whole)
    assert sum(whole.values()) < 1e-3 * sum(math.prod(p.shape) for p in params.values())


@pytest.mark.parametrize(
    ("path", "stored"),
    [
        ("text.layers.attn.q.kernel_nhd", "text.layers.attn.q_kernel_nhd"),
        ("text.layers.attn.q.lora.kernel_zd", "text.layers.attn.q_lora.kernel_zd"),
        ("opt_state.1.0.mu.text.layers.mlp.down.kernel_df", "opt_state.1.0.mu.text.layers.mlp.down_kernel_df"),
        ("text.head.table_vd", "text.head.kernel_vd"),
        ("text.layers.attn.q.bias", "text.layers.attn.q_bias"),
        ("vision.patch_embed.kernel_dc", "vision.patch_embed.kernel_dc"),
        ("vision.deepstack_mergers.up.kernel_fd", "vision.deepstack_mergers.up_kernel_fd"),
        ("vision.merger.norm.bias", "vision.merger.norm.bias"),
    ],
)
def test_checkpoints_keep_the_parameter_names_of_version_0_2(path, stored):
    for keys in (path.split("."), [path], [stored]):
        assert sharding.param_name(keys) == stored


def test_an_indivisible_parameter_is_named_with_its_axis():
    spec = sharding.param_spec("q_kernel_nhd", 4)
    with pytest.raises(ValueError, match="axis 1 of size 7 does not split over tensor=2"):
        sharding.check_divisible("q_kernel_nhd", (3, 7, 5, 11), spec, dict(data=1, fsdp=1, tensor=2))


@pytest.mark.parametrize(("fsdp", "num_devices"), [(2, 12), (0, 0), (-1, -6)])
def test_a_mesh_that_the_machine_cannot_have_is_rejected(fsdp, num_devices):
    with pytest.raises(ValueError, match=f"data=3 x fsdp={fsdp} x tensor=2 needs {num_devices} devices, but there are"):
        sharding.make_mesh(data=3, fsdp=fsdp, tensor=2)


@dataclass(frozen=True)
class Chip:
    """The TPU attributes that jax reads to arrange a mesh."""

    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    device_kind: str = "TPU v6 lite"
    platform: str = "tpu"


def chips(x: int, y: int, z: int = 1, *, host_sides: tuple[int, int]) -> list[Chip]:
    """Returns the chips of a slice, ordered by host; `host_sides` is the shape of a host."""
    wide, high = host_sides
    found = [
        Chip((c * (y // high) + b // high) * (x // wide) + a // wide, (a, b, c))
        for c, b, a in product(range(z), range(y), range(x))
    ]
    return sorted(found, key=lambda chip: chip.process_index)


def test_a_mesh_that_does_not_match_the_links_is_rejected():
    expected = r"^mesh.data=1 x mesh.fsdp=8 x mesh.tensor=2 does not fit the links between .* 16 TPU v6 lite: .* sides$"
    with pytest.raises(ValueError, match=expected):
        sharding.make_mesh(1, 8, 2, chips(4, 4, host_sides=(4, 4)))


@pytest.mark.parametrize("sides", [(2, 2), (4, 4), (2, 2, 2), (4, 8), (2, 2, 4), (4, 4, 4)])
def test_every_mesh_that_divides_hosts_of_four_chips_matches_them(sides):
    slice_of_hosts, num_chips = chips(*sides, host_sides=(2, 2)), math.prod(sides)
    shapes = [shape for shape in product(range(1, num_chips + 1), repeat=3) if math.prod(shape) == num_chips]
    splitting = [shape for shape in shapes if splits(shape, num_chips // 4)]
    assert splitting
    for shape in splitting:
        placed = sharding._arrange_on_hosts(*shape, slice_of_hosts)
        assert placed.shape == shape and set(placed.flat) == set(slice_of_hosts)
        assert all(len({chip.process_index for chip in row}) == 1 for row in placed.reshape(-1, shape[-1]))


def test_hosts_with_unequal_numbers_of_devices_are_rejected():
    slice_of_hosts = chips(4, 2, host_sides=(2, 2))
    uneven = [chip for chip in slice_of_hosts if chip.process_index == 0 or chip.coords[1] == 0]
    with pytest.raises(ValueError, match="must have the same number of devices, but they have: host 0 4, host 1 2"):
        sharding.make_mesh(1, 6, 1, uneven)


def splits(shape: tuple[int, int, int], num_hosts: int) -> bool:
    try:
        sharding.over_hosts(*shape, num_hosts)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"tensor": 2, "data": 2, "fsdp": 2}], ids=str)
def test_any_mesh_with_some_of_our_axes_computes_the_same_logits(tiny_hf, sizes):
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))  # with explicit axes
    ids = np.arange(1, 12)
    expected, logits = (model_port.logits(model_port.load(tiny_hf, mesh=each), ids) for each in (None, mesh))
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_users_mesh_keeps_its_devices_and_rejects_unknown_axes():
    mesh = jax.make_mesh((2, 4), ("tensor", "data"))
    ours = sharding.with_all_axes(mesh)
    assert dict(ours.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert (ours.devices[:, 0] == mesh.devices.T).all()
    with pytest.raises(ValueError, match=r"axis 'model'.*make_mesh\(fsdp=8\)"):
        sharding.with_all_axes(jax.make_mesh((8,), ("model",)))
