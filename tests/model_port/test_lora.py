"""Adapters: their effect, gradients, files and export, and compatibility with PEFT."""

import json
import math
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from changed_files import change_tensors, edit
from flax import nnx
from reference import tied
from safetensors.numpy import load_file, save_file

import model_port
from model_port.adapters import (
    AdapterBase,
    AdapterInfo,
    adapter_shapes,
    add_adapter,
    base_checksum,
    files_of_base,
    merged_tensors,
    new_adapter,
    read_adapter_info,
    write_adapter,
)
from model_port.config import PRESETS, LoraConfig, ModelConfig, TextConfig
from model_port.convert import convert
from model_port.download import source_directory
from model_port.export import export, export_adapter
from model_port.hf_files import read_side_files, write_side_files
from model_port.inputs import RowSequence, Tokens, pack_text
from model_port.layers import Compute, split
from model_port.loading import abstract_model, files_directory, with_params
from model_port.model import VLModel
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.sharding import check_divisible, flat_params, make_mesh, param_spec
from model_port.tiny import TINY, make_tiny, tiny_config
from model_port.weights import adapter_rules, rules

CONFIG = tied(
    TextConfig(3, 24, 28, 6, 2, head_dim=8, vocab_size=131, mrope_sections=(2, 1, 1)),
    Qwen3VisionConfig(2, 16, 20, 2, 24, (0,), num_positions=25, patch_px=4),
)
LORA = LoraConfig(rank=3, alpha=7.0)
COMPUTES = {
    "scan": Compute(attention="xla", remat="dots"),
    "blocked attention, remat": Compute(attention="blocked", remat="full"),
    "scanned attention, remat": Compute(attention="scanned", remat="attention"),
}


def trained(config: ModelConfig, lora: LoraConfig = LORA, seed: int = 1) -> dict[str, np.ndarray]:
    """Returns an adapter without zeros."""
    random = np.random.default_rng(seed)
    shapes = adapter_shapes(config, lora.rank)
    return {path: (0.1 * random.standard_normal(shape)).astype(np.float32) for path, shape in shapes.items()}


def adapted(model: VLModel, params=None, lora: LoraConfig = LORA) -> VLModel:
    add_adapter(model, lora, trained(model.config, lora) if params is None else params)
    return model


@pytest.fixture(scope="module")
def packed():
    """Returns a row with two prompts, one of which has branches."""
    random = np.random.default_rng(3)
    one, two, *branches = (Tokens(random.integers(0, 119, length).astype(np.int32)) for length in (7, 11, 5, 3, 4))
    rows = [[RowSequence(one, tuple(branches)), RowSequence(two)]]
    return jax.tree.map(jnp.asarray, pack_text(rows, [], [], CONFIG, 32))


def value_and_gradient(model: VLModel, kind, text):
    weight = np.random.default_rng(5).standard_normal((*text.tokens.shape, CONFIG.text.width)).astype(np.float32)
    graphdef, wanted, rest = nnx.split(model, kind, ...)

    def objective(wanted):
        hidden = nnx.merge(graphdef, wanted, rest).hidden(text)
        return jnp.sum(jnp.where(text.segment_ids[..., None] > 0, hidden * weight, 0))

    value, gradient = jax.jit(jax.value_and_grad(objective))(wanted)
    return float(value), {path: np.asarray(leaf) for path, leaf in flat_params(gradient).items()}


@pytest.fixture(scope="module")
def by_merging(packed):
    """The value and gradient of a model without adapters, made from an adapted model's exported tensors."""
    merged = merged_tensors(adapted(VLModel(CONFIG, rngs=nnx.Rngs(2))))
    tensors = {name: np.asarray(tensor) for name, tensor in merged}
    plain = VLModel(CONFIG, rngs=nnx.Rngs(0))
    shapes = {path: leaf.shape for path, leaf in flat_params(nnx.state(plain)).items()}
    params = {r.path: np.stack([tensors[name] for name in r.hf_names]) for r in rules(CONFIG)}
    params = {path: jnp.asarray(params[path].reshape(shape)) for path, shape in shapes.items()}
    return value_and_gradient(with_params(plain, params), nnx.Param, packed)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPUTES)
def test_an_adapter_has_the_values_and_gradients_of_merged_kernels(name, packed, by_merging):
    """dA = scale · Bᵀ dW and dB = scale · dW Aᵀ, with every compute option."""
    model = adapted(VLModel(CONFIG, compute=COMPUTES[name], rngs=nnx.Rngs(2)))
    value, gradient = value_and_gradient(model, nnx.LoRAParam, packed)
    expected_value, of_kernels = by_merging
    assert value == pytest.approx(expected_value, rel=1e-5)
    params = trained(CONFIG)
    assert len(gradient) == 2 * 7
    for rule in rules(CONFIG):
        if pair := adapter_rules(CONFIG, LORA.rank).get(rule.path):
            for layer in range(CONFIG.text.num_layers):
                d_kernel = rule.tensor(of_kernels, layer)
                (a, b), got = ([side.tensor(arrays, layer) for side in pair] for arrays in (params, gradient))
                for found, chained in zip(got, (b.T @ d_kernel, d_kernel @ a.T), strict=True):
                    error = np.linalg.norm(found - LORA.scale * chained)
                    assert error <= 1e-5 * np.linalg.norm(found), rule.path


@pytest.mark.slow
def test_a_new_adapter_changes_no_output_bit(tiny_hf):
    ids = np.arange(5, 44)
    model = model_port.load(tiny_hf)
    before = model_port.logits(model, ids)
    new = new_adapter(model.config, LORA, seed=0)
    add_adapter(model, LORA, new)
    np.testing.assert_array_equal(model_port.logits(model, ids), before)
    changed = {path: array + np.float32(path.endswith("z")) for path, array in new.items()}
    assert np.abs(model_port.logits(adapted(model, changed), ids) - before).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", TINY)
def test_joined_projections_have_the_values_of_separate_ones(family, tensor):
    model = adapted(VLModel(tiny_config(family), rngs=nnx.Rngs(2)))
    nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.01, nnx.state(model)))  # biases start at zero
    expected = model_port.logits(model, IDS)
    model.text.layers = split(model.text.layers, [1] * model.config.text.num_layers)
    for layer in model.text.layers:
        layer.join(tensor)
    assert not nnx.state(model, nnx.LoRAParam)
    np.testing.assert_allclose(model_port.logits(model, IDS), expected, rtol=1e-5, atol=1e-5)


def test_a_model_without_adapters_has_no_adapter_parameters(packed):
    graphdef, params = nnx.split(abstract_model(CONFIG))
    assert not [path for path in flat_params(params) if "lora" in path]
    program = jax.make_jaxpr(lambda params: nnx.merge(graphdef, params).hidden(packed))(params)
    kernels = sum(rule.path in adapter_rules(CONFIG, 1) for rule in rules(CONFIG))
    graphdef, params = nnx.split(adapted(abstract_model(CONFIG)))
    beside = jax.make_jaxpr(lambda params: nnx.merge(graphdef, params).hidden(packed))(params)
    products = [str(jaxpr).count("dot_general") for jaxpr in (program, beside)]
    assert products[1] - products[0] == 2 * kernels


@pytest.mark.parametrize("name", PRESETS)
def test_every_kernel_of_a_layer_has_an_adapter_with_the_same_sharding(name):
    config, rank = PRESETS[name], 64
    shapes = adapter_shapes(config, rank)
    for kernel, (a, b) in adapter_rules(config, rank).items():
        whole = next(rule for rule in rules(config) if rule.path == kernel)
        assert (b.hf_shape[0], a.hf_shape[1]) == whole.hf_shape and a.hf_shape[0] == b.hf_shape[1] == rank
        for side in (a, b):
            assert math.prod(shapes[side.path]) == math.prod(side.hf_shape) * side.count
            spec = param_spec(side.path, len(shapes[side.path]))
            assert spec[side.path.rpartition("_")[2].index("z") + 1] is None
            sizes = dict(data=1, fsdp=64, tensor=config.text.num_kv_heads)
            check_divisible(side.path, shapes[side.path], spec, sizes)
            assert side.hf.startswith("base_model.model.model.language_model.layers.")  # as PEFT names them
    kernels = {"q_kernel_nhd", "k_kernel_khd", "v_kernel_khd", "o_kernel_dnh"}
    if not config.text.num_experts:
        kernels |= {"gate_kernel_fd", "up_kernel_fd", "down_kernel_df"}
    assert {kernel.rpartition(".")[2] for kernel in adapter_rules(config, rank)} == kernels


@pytest.fixture(scope="module")
def on_disk(tiny_hf, tmp_path_factory) -> Path:
    """A trained adapter next to the tiny model, as in a run's checkpoint."""
    return write_trained(tiny_hf, tmp_path_factory.mktemp("adapter"))


def write_trained(hf: Path, directory: Path, dtype: str = "float32") -> Path:
    model = model_port.load(hf)
    base = AdapterBase(str(hf), dtype, base_checksum(model, dtype), files_of_base(hf))
    write_adapter(directory, model.config, AdapterInfo(LORA, base), trained(model.config))
    return directory


NORM = "model.language_model.norm.weight"
IDS = np.random.default_rng(7).integers(5, 900, 37)


@pytest.mark.slow
def test_an_adapter_is_read_as_written(tiny_hf, on_disk):
    model, loaded = adapted(model_port.load(tiny_hf)), model_port.load(on_disk)
    assert loaded.lora == LORA
    np.testing.assert_array_equal(model_port.logits(loaded, IDS), model_port.logits(model, IDS))
    half = flat_params(nnx.state(model_port.load(on_disk, "bfloat16", make_mesh(fsdp=4, tensor=2)), nnx.Param))
    assert {len(leaf.sharding.device_set) for leaf in half.values()} == {8}
    assert {leaf.dtype.name for path, leaf in half.items() if "_lora." in path} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hf", "checkpoint"])
def test_an_export_merges_the_adapter(form, tiny_hf, on_disk, tmp_path):
    adapter = on_disk
    if form == "checkpoint":
        convert(tiny_hf, tmp_path / "ckpt")
        adapter = shutil.copytree(on_disk, tmp_path / "adapter")
        rebased(adapter, tmp_path / "ckpt")
    export(adapter, tmp_path / "hf", "float32")
    merged, apart = (model_port.logits(model_port.load(path), IDS) for path in (tmp_path / "hf", on_disk))
    np.testing.assert_allclose(merged, apart, atol=1e-5)


def test_an_adapter_is_merged_into_base_weights_of_the_dtype_in_training(tiny_hf, tmp_path):
    write_trained(tiny_hf, tmp_path, "bfloat16")
    assert export(tmp_path, tmp_path / "hf").dtype == "bfloat16"  # the base's files are in float32


@pytest.mark.parametrize("write", [export, export_adapter])
def test_an_export_never_replaces_the_base_of_its_adapter(write, tmp_path):
    make_tiny(tmp_path / "base")
    adapter = write_trained(tmp_path / "base", tmp_path)
    with pytest.raises(ValueError, match=r"base is in \S+base, which would be replaced; choose another directory"):
        write(adapter, tmp_path / "base", force=True)


@pytest.mark.slow
def test_an_adapter_is_exported_alone_in_any_dtype(on_disk, tmp_path):
    export_adapter(on_disk, tmp_path / "same")
    for force in (False, True):
        export_adapter(on_disk, tmp_path / "half", "bfloat16", force=force)
    paths = (on_disk, tmp_path / "same", tmp_path / "half")
    own, same, half = (load_file(path / "adapter_model.safetensors") for path in paths)
    for name, array in own.items():
        np.testing.assert_array_equal(same[name], array)
        np.testing.assert_array_equal(half[name], array.astype("bfloat16"))
    assert read_adapter_info(tmp_path / "same").lora == read_adapter_info(tmp_path / "half").lora == LORA


def test_an_adapter_of_a_checkpoint_is_exported_with_its_recipe(tiny_hf, on_disk, tmp_path):
    checkpoint = shutil.copytree(on_disk, tmp_path / "4")
    write_side_files(read_side_files(tiny_hf) | {"paravt.json": b"{}"}, checkpoint / "hf")
    for source, copy in ((checkpoint, tmp_path / "once"), (tmp_path / "once", tmp_path / "twice")):
        export_adapter(source, copy)
        assert read_side_files(files_directory(copy)) == read_side_files(checkpoint / "hf")


def rebased(adapter: Path, base: Path, **changes) -> None:
    edit(adapter / "adapter_config.json", {"base_model_name_or_path": str(base), **changes})


@pytest.mark.slow
def test_an_adapter_rejects_another_bases_weights(tiny_hf, on_disk, tmp_path):
    other, adapter = shutil.copytree(tiny_hf, tmp_path / "other"), shutil.copytree(on_disk, tmp_path / "adapter")
    change_tensors(other, lambda tensors: np.multiply(tensors[NORM], 1.001, out=tensors[NORM]))
    rebased(adapter, other)
    with pytest.raises(ValueError, match=r"was trained with other weights than .* has now"):
        model_port.load(adapter)
    with pytest.raises(ValueError, match="was trained with other weights than"):
        export(adapter, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    change_tensors(other, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ValueError, match=f"other: its tensors do not match its config: 1 missing: {NORM}"):
        export(adapter, tmp_path / "hf")
    rebased(adapter, tmp_path / "moved")
    with pytest.raises(ValueError, match=r"base_model_name_or_path of .* is neither a directory"):
        export(adapter, tmp_path / "hf")
    rebased(adapter, on_disk)
    with pytest.raises(ValueError, match="an adapter itself"):
        model_port.load(adapter)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("config.json", "text_config.rope_theta", 5e5), r"config\.text\.rope_theta is 500000\.0, was 10000\.0"),
        (("config.json", "text_config.rms_norm_eps", 1e-5), r"config\.text\.norm_eps is 1e-05, was 1e-06"),
        (("tokenizer.json", "version", "2.0"), r"tokenizer\.json is xxh3 \w+, was xxh3 "),
        (("tokenizer_config.json", "chat_template", "{{ messages }}"), r"chat_template\.jinja is xxh3 \w+, was xxh3 "),
        (("preprocessor_config.json", "size.longest_edge", 10**5), r"processor\.max_pixels is 100000, was \d+"),
    ],
)
def test_an_adapter_rejects_another_bases_files(change, message, tiny_hf, on_disk, tmp_path):
    base, adapter = shutil.copytree(tiny_hf, tmp_path / "base"), shutil.copytree(on_disk, tmp_path / "adapter")
    rebased(adapter, base)
    file, key, value = change
    edit(base / file, {key: value})
    if key == "chat_template":
        (base / "chat_template.jinja").unlink()
    for use in (model_port.load, lambda path: export(path, tmp_path / "hf")):
        with pytest.raises(ValueError, match=f"was trained when 1 values in the files of .* were different: {message}"):
            use(adapter)
    edit(adapter / "paravt_jax.json", {"base.files": None})  # adapters of earlier versions have none
    assert model_port.load(adapter).lora == LORA


@pytest.mark.slow
def test_a_converted_or_resaved_base_is_accepted(tiny_hf, tmp_path):
    convert(tiny_hf, tmp_path / "ckpt")
    base = shutil.copytree(tiny_hf, tmp_path / "base")
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_text(json.dumps(json.loads((base / name).read_text()), indent=7))
    edit(base / "config.json", {"text_config.initializer_range": 0.5})
    assert files_of_base(tmp_path / "ckpt" / "hf") == files_of_base(base) == files_of_base(tiny_hf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_rslora": True}, "use_rslora=True is not supported"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern="),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; expected 'LORA'"),
        ({"alora_invocation_tokens": [7]}, r"alora_invocation_tokens=\[7\] is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' also changed weights of the base"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights='OLoRA' also changed weights of the base"),
        ({"r": 5}, r"lora_A.weight \(3, 128\) is not a rank-5 adapter"),
    ],
)
def test_an_unsupported_adapter_is_rejected(changes, message, on_disk, tmp_path):
    adapter = shutil.copytree(on_disk, tmp_path / "adapter")
    rebased(adapter, json.loads((on_disk / "adapter_config.json").read_text())["base_model_name_or_path"], **changes)
    with pytest.raises(ValueError, match=message):
        model_port.load(adapter)


def test_an_adapter_with_another_revision_of_its_base_needs_a_directory(tiny_hf, on_disk, tmp_path):
    adapter = shutil.copytree(on_disk, tmp_path / "adapter")
    rebased(adapter, "Qwen/Qwen3-VL-2B-Instruct", revision="v2")
    with pytest.raises(ValueError, match="run `hf download Qwen/Qwen3-VL-2B-Instruct --revision v2 --local-dir DIR`"):
        model_port.load(adapter)
    rebased(adapter, tiny_hf, revision="v2")
    assert model_port.load(adapter).lora == LORA


def test_a_model_is_rejected_as_an_adapter(tiny_hf, tmp_path):
    with pytest.raises(ValueError, match=r"is not an adapter: it has no adapter_config\.json"):
        export_adapter(tiny_hf, tmp_path / "out")
    with pytest.raises(ValueError, match=r"gone is not a directory"):
        export_adapter(tmp_path / "gone", tmp_path / "out")


@pytest.mark.parametrize("read", [export, export_adapter, lambda src, dst: source_directory(src)])
def test_the_error_of_a_missing_checkpoint_names_the_newest_one(read, tmp_path):
    (checkpoints := tmp_path / "run" / "checkpoints").joinpath("4").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"/3 does not exist; the newest checkpoint of {tmp_path}/run is \S+/4$"):
        read(checkpoints / "3", tmp_path / "out")


@pytest.fixture(scope="module")
def peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft")


def reference_logits(hf_dir: Path, wrapped) -> np.ndarray:
    """Returns the logits of transformers' model after `wrapped` has modified it."""
    import torch
    from transformers import AutoModelForImageTextToText

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = wrapped(AutoModelForImageTextToText.from_pretrained(hf_dir, dtype=torch.float32)).eval()
        return model(input_ids=torch.from_numpy(IDS)[None]).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"])
def test_peft_computes_the_same_from_our_files(peft, family, tmp_path):
    hf = tmp_path / "hf"
    make_tiny(hf, config=tiny_config(family))
    adapter = write_trained(hf, tmp_path)

    def with_ours(model):
        model = peft.PeftModel.from_pretrained(model, adapter)
        names = {name.replace(".default", "") for name, _ in model.named_parameters() if "lora_" in name}
        assert names == load_file(adapter / "adapter_model.safetensors").keys()  # PEFT adds no others
        return model

    expected = reference_logits(hf, with_ours)
    got = model_port.logits(model_port.load(adapter), IDS)
    assert np.abs(got - expected).max() <= 1e-5
    assert np.abs(got - model_port.logits(model_port.load(hf), IDS)).max() > 0.1


@pytest.mark.slow
def test_an_adapter_of_qwen2_5_vl_may_have_published_names(tmp_path):
    make_tiny(tmp_path / "base", config=tiny_config("qwen2_5_vl"))
    adapter = write_trained(tmp_path / "base", tmp_path)
    expected = model_port.logits(model_port.load(adapter), IDS)
    file = adapter / "adapter_model.safetensors"
    tensors = {name.replace(".language_model.", "."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    assert np.array_equal(model_port.logits(model_port.load(adapter), IDS), expected)
    name, tensor = next(iter(tensors.items()))
    save_file({**tensors, name.replace("model.layers", "model.language_model.layers"): tensor}, file)
    with pytest.raises(ValueError, match="twice"):
        model_port.load(adapter)


@pytest.mark.slow
def test_a_peft_adapter_may_omit_kernels(peft, tiny_hf, tmp_path):
    import torch

    def with_some(model):
        settings = peft.LoraConfig(r=5, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        model, random = peft.get_peft_model(model, settings), torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
        model.save_pretrained(tmp_path / "theirs")
        return model

    expected = reference_logits(tiny_hf, with_some)
    loaded = model_port.load(tmp_path / "theirs")
    assert loaded.lora == LoraConfig(5, 8.0)
    assert np.abs(model_port.logits(loaded, IDS) - expected).max() <= 1e-5
    assert not flat_params(nnx.state(loaded))["text.layers.attn.k_lora.kernel_zd"].any()
