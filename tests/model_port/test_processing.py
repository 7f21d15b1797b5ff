"""The vision contract equals transformers' PIL image processor bit for bit."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from on_use import pil_processing
from PIL import Image

from model_port.processing import (
    SUPPORTED_SETTINGS,
    VisionContract,
    expand_placeholders,
    frame_size,
    process_images,
    resize,
    settled_size,
    token_counts,
)

HALF = (0.5, 0.5, 0.5)
PUBLISHED = VisionContract(16, 2, 2, 65536, 16777216, HALF, HALF)
RECIPE = VisionContract(16, 2, 2, 784, 50176, HALF, HALF)
# All values differ, so that no value can be confused with another.
ODD = VisionContract(6, 3, 5, 700, 9000, (0.11, 0.47, 0.83), (0.23, 0.31, 0.59), 1 / 127)
# Sides are multiples of 2, so that cases can be written by hand; normalized values equal the bytes.
BYTES = VisionContract(1, 2, 2, 4, 4096, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 1.0)
CONTRACTS = {"published": PUBLISHED, "recipe": RECIPE, "odd": ODD}
START, END, IMAGE = 151_652, 151_653, 151_655


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def to_hf(contract: VisionContract) -> dict:
    """Returns a preprocessor_config.json with every key."""
    return {
        "size": {"shortest_edge": contract.min_pixels, "longest_edge": contract.max_pixels},
        "patch_size": contract.patch_px,
        "merge_size": contract.merge,
        "temporal_patch_size": contract.temporal_patch_frames,
        "image_mean": list(contract.mean),
        "image_std": list(contract.std),
        "rescale_factor": contract.rescale_factor,
        **SUPPORTED_SETTINGS,
    }


def assert_equals_reference(images: list[np.ndarray], contract: VisionContract) -> None:
    # PIL images, because transformers cannot infer the channel axis of an array with a side of 1 or 3.
    pictures = [Image.fromarray(image) for image in images]
    out = pil_processing.Qwen2VLImageProcessorPil(**to_hf(contract))(images=pictures, return_tensors="np")
    for ours, name in zip(process_images(images, contract), ("pixel_values", "image_grid_thw"), strict=True):
        assert ours.dtype == out[name].dtype
        np.testing.assert_array_equal(ours, out[name])


def write(directory, name: str, content: dict) -> None:
    (directory / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("published", [(1, 1), (7, 1399), (224, 224), (256, 256), (263, 509), (720, 1280), (288, 352)]),
        ("recipe", [(1, 1), (2, 3), (13, 997), (41, 43), (224, 224), (160, 288), (720, 1280), (1279, 719), (48, 80)]),
        ("odd", [(1, 97), (18, 36), (90, 90), (101, 211), (500, 20)]),
    ],
)
def test_images_equal_transformers_bit_for_bit(name, sizes):
    assert_equals_reference([noise(height, width, height) for height, width in sizes], CONTRACTS[name])


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(height=st.integers(1, 20_000), width=st.integers(1, 20_000), name=st.sampled_from(list(CONTRACTS)))
def test_every_frame_size_equals_transformers(height, width, name):
    assume(max(height, width) <= 200 * min(height, width))
    contract = CONTRACTS[name]
    expected = pil_processing.smart_resize(height, width, contract.unit_px, contract.min_pixels, contract.max_pixels)
    assert frame_size(height, width, contract) == expected


@settings(max_examples=500, deadline=None)
@given(height=st.integers(1, 5000), width=st.integers(1, 5000), name=st.sampled_from(["published", "recipe"]))
def test_one_resize_is_stable_for_ordinary_images(height, width, name):
    assume(max(height, width) <= 40 * min(height, width))
    assert settled_size(height, width, CONTRACTS[name]) == frame_size(height, width, CONTRACTS[name])


@pytest.mark.parametrize(("height", "width"), [(720, 1280), (480, 640), (1, 1), (20, 3900), (2245, 44)])
def test_a_settled_frame_has_the_same_pixels_on_both_sides(height, width):
    frame = noise(*settled_size(height, width, RECIPE))
    assert resize(frame, RECIPE) is frame
    assert_equals_reference([frame], RECIPE)


@pytest.mark.parametrize(("patch_px", "max_pixels"), [(14, 1024), (14, 50176), (16, 50176), (16, 50000), (16, 1024)])
def test_the_largest_image_is_made_of_whole_tokens(patch_px, max_pixels):
    contract = dataclasses.replace(RECIPE, patch_px=patch_px, max_pixels=max_pixels)
    sizes = (settled_size(height, 1024, contract) for height in range(64, 1024, 32))
    most = max(height * width // patch_px**2 for height, width in sizes)
    assert most <= contract.max_patches(max_pixels) <= max_pixels // patch_px**2
    assert contract.max_patches(max_pixels) % contract.merge**2 == 0


def test_one_resize_is_not_stable_for_a_narrow_image():
    # 44 x 2245 exceeds 50176: / sqrt(98780 / 50176) = 31 x 1600, and 32 x 1600 = 51200 exceeds it again.
    assert frame_size(44, 2245, RECIPE) == (32, 1600)
    assert settled_size(44, 2245, RECIPE) == (32, 1568)


def test_pixel_bounds_without_a_stable_size_are_rejected():
    contract = dataclasses.replace(RECIPE, min_pixels=50176)
    with pytest.raises(ValueError, match=r"360 x 640 px has no stable size between min_pixels=50176 and max_pixels=50"):
        settled_size(360, 640, contract)


def test_patches_follow_merge_blocks_then_channel_then_time_then_rows():
    # An image of 2 x 4 pixels fills both frames; patches of 1 pixel, merged 2 x 2: the left block's four come first.
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)  # value = 12 row + 3 column + channel
    patches, grids = process_images([image], BYTES)
    assert grids.tolist() == [[1, 2, 4]]
    assert patches[:4].tolist() == [np.repeat([n, n + 1, n + 2], 2).tolist() for n in (0, 3, 12, 15)]
    assert patches[4:, 0].tolist() == [6, 9, 18, 21]


def test_to_hf_loads_into_transformers_and_back(tmp_path):
    write(tmp_path, "preprocessor_config.json", to_hf(ODD))
    loaded = pil_processing.Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    image = noise(83, 61)
    np.testing.assert_array_equal(loaded(images=[image])["pixel_values"], process_images([image], ODD)[0])
    loaded.save_pretrained(tmp_path)
    assert VisionContract.from_hf(tmp_path) == ODD


PUBLISHED_FILE = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
FILE, NESTED_FILE = "preprocessor_config.json", "processor_config.json"
OLDER = {"min_pixels": 784, "max_pixels": 50176}
NULLS = dict.fromkeys(("min_pixels", "max_pixels", "rescale_factor", "resample", "do_resize"))


@pytest.mark.parametrize(
    ("name", "content", "contract"),
    [
        (FILE, PUBLISHED_FILE, PUBLISHED),
        (NESTED_FILE, {"image_processor": to_hf(ODD), "processor_class": "Qwen3VLProcessor"}, ODD),
        (FILE, {**to_hf(RECIPE), "size": OLDER, **OLDER}, RECIPE),
        (FILE, {**to_hf(RECIPE), "size": None, **OLDER}, RECIPE),
        (FILE, {**to_hf(RECIPE), **NULLS}, RECIPE),
    ],
    ids=["published", "nested", "older", "oldest", "nulls are absent"],
)
def test_every_spelling_of_a_processor_file_is_read(tmp_path, name, content, contract):
    write(tmp_path, name, content)
    assert VisionContract.from_hf(tmp_path) == contract


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": None}, r"preprocessor_config.json: size.shortest_edge \(or min_pixels\) is missing"),
        ({"min_pixels": 3136}, "size.shortest_edge=784 and min_pixels=3136 contradict each other"),
        ({"size": {"shortest_edge": 60000, "longest_edge": 50176}}, "json: min_pixels=60000 exceeds max_pixels=50176"),
        ({"image_mean": [0.5]}, r"json: image_mean=\[0.5\] must be a list of 3 numbers"),
        ({"image_std": [0.5, 0.0, 0.5]}, r"json: image_std=\[0.5, 0.0, 0.5\] must be a list of 3 numbers from 1e-09"),
        ({"resample": 2}, "json: resample=2 is not supported; expected 3"),
        ({"do_resize": False}, "json: do_resize=False is not supported"),
        ({"merge_size": None}, r"preprocessor_config.json: key 'merge_size' is missing"),
    ],
)
def test_a_bad_processor_file_is_named_with_its_key(tmp_path, change, message):
    write(tmp_path, FILE, {key: value for key, value in {**to_hf(RECIPE), **change}.items() if value is not None})
    with pytest.raises(ValueError, match=message):
        VisionContract.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {NESTED_FILE: '{"processor_class": "Qwen3VLProcessor"}'},
            r"neither preprocessor_config.json nor a processor_config.json with the key",
        ),
        ({FILE: '{"size": '}, r"preprocessor_config.json is not valid JSON"),
        (
            {NESTED_FILE: json.dumps({"image_processor": to_hf(RECIPE)}), FILE: json.dumps(to_hf(PUBLISHED))},
            "disagree on min_pixels, max_pixels; delete one",
        ),
    ],
    ids=["none", "broken", "contradiction"],
)
def test_unusable_processor_files_are_rejected(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        VisionContract.from_hf(tmp_path)


def test_each_image_placeholder_becomes_its_number_of_tokens():
    ids = np.array([5, START, IMAGE, END, 7, START, IMAGE, END])
    expected = [5, START, *[IMAGE] * 3, END, 7, START, *[IMAGE] * 2, END]
    assert expand_placeholders(ids, [3, 2], IMAGE).tolist() == expected


def test_token_counts_are_merged_patches():
    _, grids = process_images([noise(64, 96), noise(160, 288)], RECIPE)
    assert token_counts(grids, merge=2) == [2 * 3, 5 * 9]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "at least one image, got an empty list"),
        ([np.zeros((0, 5, 3), np.uint8)], "at least one pixel, got height 0, width 5"),
        ([noise(1, 201)], r"at most 200 times the shorter, got height 1, width 201 \(201.0 times\)"),
        ([np.zeros((5, 7, 3), np.float32)], r"must be uint8 \[height, width, 3\], got float32 \[5, 7, 3\]"),
        ([np.zeros((3, 5, 7), np.uint8)], r"got uint8 \[3, 5, 7\]; scale to 0..255, put channels last"),
        ([np.zeros((5, 7), np.uint8)], r"got uint8 \[5, 7\].* convert to RGB"),
    ],
)
def test_an_unusable_image_is_a_one_line_error(images, message):
    with pytest.raises(ValueError, match=message):
        process_images(images, RECIPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_pixels": 50177}, "min_pixels=50177 exceeds max_pixels=50176"),
        ({"max_pixels": 1023}, "max_pixels=1023 is less than the smallest image, 32 x 32 px; raise it to 1024"),
    ],
)
def test_an_impossible_contract_is_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RECIPE, **change)


@pytest.mark.parametrize(
    ("ids", "counts", "message"),
    [
        ([5, IMAGE], [3, 4], r"have 1 placeholders \(token 151655\), but there are 2 images"),
        ([IMAGE, IMAGE], [2], "have 2 placeholders .* not expanded"),
    ],
)
def test_placeholders_that_do_not_match_the_images_are_rejected(ids, counts, message):
    with pytest.raises(ValueError, match=message):
        expand_placeholders(np.array(ids), counts, IMAGE)
