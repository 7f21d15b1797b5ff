"""Peak memory of loading a model and of its logits, and logits of selected tokens."""

import shutil
import tracemalloc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from changed_files import change_tensors
from flax import nnx

import model_port
from model_port import loading
from model_port.config import FAMILIES, read_config
from model_port.inputs import TextBatch
from model_port.layers import Compute
from model_port.loading import abstract_model, abstract_params, load_computing, with_params
from model_port.reference import Reference
from model_port.tiny import make_tiny, tiny_config
from model_port.verify import LogitsDifference, video_prompt
from model_port.weights import num_params, open_hf_tensors, read_param, rules, stored_dtype

KERNEL = "text.layers.mlp.up_kernel_fd"
WHOLE = (slice(None),) * 3


def deep_config():
    config = tiny_config()
    return replace(config, text=replace(config.text, num_layers=24, ffn_width=1024))


@pytest.mark.slow
def test_reading_a_stack_needs_few_extra_tensors_and_a_cpu_uses_it_in_place(tmp_path):
    config = deep_config()
    make_tiny(tmp_path / "hf", config=config, dtype="bfloat16")
    (rule,) = (rule for rule in rules(config) if rule.path == KERNEL)
    shape = (24, 1024, config.text.width)
    with open_hf_tensors(tmp_path / "hf", config) as tensors:
        tracemalloc.start()
        read = read_param(tensors, rule, shape, WHOLE, np.float32)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        stored = np.stack([tensors.read(name) for name in rule.hf_names])
    assert np.array_equal(read, stored.astype(np.float32))
    assert peak_bytes < 1.1 * read.nbytes  # each of 4 readers holds a bfloat16 tensor of 1/48 of its size
    assert jax.device_put(read, jax.devices("cpu")[0]).unsafe_buffer_pointer() == read.ctypes.data


@pytest.mark.parametrize("load", [model_port.load, load_computing])
def test_a_model_loads_and_computes_in_the_given_dtype(load, tiny_hf):
    model = load(tiny_hf, "bfloat16")
    assert model.compute.dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"bfloat16"}
    with pytest.raises(ValueError, match="dtype 'int8' is not one of float32, bfloat16, float16"):
        load(tiny_hf, "int8")


def test_finding_the_dtype_of_files_leaves_none_open(tiny_hf, tmp_path):
    hf = shutil.copytree(tiny_hf, tmp_path / "hf")
    assert stored_dtype(hf) == "float32"
    change_tensors(hf, lambda arrays: arrays.update({name: arrays[name].astype(np.float16) for name in arrays}))
    assert stored_dtype(hf) == "float16"
    assert not [file for file in psutil.Process().open_files() if str(hf) in file.path]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_never_widen_a_whole_stack_of_16_bit_weights(dtype):
    config = deep_config()
    model = abstract_model(config, Compute(dtype))
    graphdef, params = nnx.split(with_params(model, abstract_params(model, "bfloat16")))
    rows = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    text = TextBatch(rows, jax.ShapeDtypeStruct((1, 64, 3), jnp.int32), rows, rows, rows)

    def temporary_bytes(program) -> int:
        memory = program.lower(graphdef, params, text, None, None).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporary_bytes(loading._logits_by_layer) < num_params(config)
    if jax.__version_info__ < (0, 12):  # later compilers never widen a stack on a CPU
        assert num_params(config) < temporary_bytes(loading._logits)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["ours", "transformers"])
def test_logits_of_some_tokens_are_rows_of_all(side, tiny_hf):
    prompt, tokens = video_prompt(tiny_hf), np.array([1, 40, 250, -1])
    if side == "ours":
        model = model_port.load(tiny_hf)
        every = model_port.logits(model, prompt.ids, **prompt.media)
        some = model_port.logits(model, prompt.ids, **prompt.media, tokens=tokens)
        assert some.flags.owndata  # a view would keep an array of the device alive
    else:
        with Reference(tiny_hf) as reference:
            every, some = reference.logits(prompt), reference.logits(prompt, tokens)
    assert len(every) == len(prompt.ids) and np.abs(some - every[tokens]).max() < 1e-5


@pytest.mark.slow
def test_logits_of_a_token_after_the_end_are_an_error(tiny_hf):
    model = model_port.load(tiny_hf)
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        model_port.logits(model, np.array([5, 6, 7, 8]), tokens=np.array([0, 4]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_16_bit_files_give_the_float32_results_of_widened_files(family, tmp_path):
    narrow = tmp_path / "narrow"
    make_tiny(narrow, config=tiny_config(family), dtype="bfloat16")
    wide = shutil.copytree(narrow, tmp_path / "wide")
    change_tensors(wide, lambda arrays: arrays.update({name: arrays[name].astype(np.float32) for name in arrays}))
    prompt = video_prompt(narrow)
    models = (load_computing(path, "float32") for path in (narrow, wide))
    ours, widened = (model_port.logits(model, prompt.ids, **prompt.media) for model in models)
    assert LogitsDifference.between(ours, widened).relative_error < 1e-6
    stored, widened = Reference(narrow), Reference(wide)
    assert np.array_equal(stored.logits(prompt), widened.logits(prompt))
    (layer, *_) = stored._model.model.language_model.layers
    assert {str(parameter.dtype) for parameter in layer.parameters()} == {"torch.bfloat16"}
    (name, *_) = next(rule.hf_names for rule in rules(read_config(narrow)) if rule.path.startswith("text.layers"))
    gradient, expected = (reference.gradients(prompt, [name])[name] for reference in (stored, widened))
    assert np.array_equal(gradient, expected) and expected.any()
