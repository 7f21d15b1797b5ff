"""Every parameter of the full-size models has a place on every mesh we promise, checked on shapes alone."""

import math

import pytest
from jax.sharding import PartitionSpec

from model_port.config import PRESETS
from model_port.loading import abstract_model, abstract_params
from model_port.sharding import check_divisible, make_mesh, param_spec
from model_port.weights import check_param_paths, rules


@pytest.mark.parametrize("name", PRESETS)
def test_the_weight_table_and_the_model_name_the_same_parameters(name):
    config = PRESETS[name]
    params = abstract_params(abstract_model(config), "bfloat16")
    check_param_paths(config, set(params))
    for rule in rules(config):
        assert math.prod(params[rule.path].shape) == math.prod(rule.hf_shape) * (rule.count or 1), rule.path


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("fsdp", [1, 2, 8, 64])
@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_every_parameter_divides_on_meshes_up_to_64_by_8(name, fsdp, tensor):
    for path, leaf in abstract_params(abstract_model(PRESETS[name]), "bfloat16").items():
        spec = param_spec(path, len(leaf.shape))
        check_divisible(path, leaf.shape, spec, dict(data=1, fsdp=fsdp, tensor=tensor))


def test_all_but_small_vectors_are_split():
    """Replicated parameters of the 8B are under a thousandth of it."""
    params = abstract_params(abstract_model(PRESETS["8b"]), "bfloat16")
    whole = {
        path: math.prod(p.shape) for path, p in params.items() if param_spec(path, len(p.shape)) == PartitionSpec()
    }
    assert all(path.endswith(("scale", "bias")) for path in whole)
    assert sum(whole.values()) < 1e-3 * sum(math.prod(p.shape) for p in params.values())


def test_names_are_specs():
    assert param_spec("text.layers.attn.q_kernel_nhd", 4) == PartitionSpec(None, "tensor", None, "fsdp")
    assert param_spec("text.embed.table_vd", 2) == PartitionSpec("tensor", "fsdp")
    assert param_spec("text.layers.input_norm.scale", 2) == PartitionSpec()


def test_an_indivisible_parameter_is_named_with_its_axis():
    spec = param_spec("q_kernel_nhd", 4)
    with pytest.raises(ValueError, match="axis 1 of size 7 does not split over tensor=2"):
        check_divisible("q_kernel_nhd", (3, 7, 5, 11), spec, dict(data=1, fsdp=1, tensor=2))


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="data=3 x fsdp=2 x tensor=2 needs 12 devices, there are 8"):
        make_mesh(data=3, fsdp=2, tensor=2)
