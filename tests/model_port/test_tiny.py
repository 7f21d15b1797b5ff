"""The tiny model loads like a published one, and its tokenizer and chat format behave like the real ones."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jinja2 import TemplateError
from on_use import pil_processing, torch, transformers
from PIL import Image
from safetensors.numpy import load_file

import model_port
from model_port.config import config_from_hf
from model_port.convert import convert
from model_port.export import export
from model_port.output_dir import LIST_FILE
from model_port.processing import VisionContract
from model_port.tiny import MAX_PIXELS, SINGLE_TOKEN_NUMBERS, SPECIAL_TOKENS, TEXT, make_tiny, tiny_config
from model_port.weights import num_params, rules

PUBLISHED_FIRST_ID, PUBLISHED_IDS = 151_643, {"<|im_end|>": 151_645, "<|image_pad|>": 151_655, "</think>": 151_668}
SHOWN = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
CROP = {"name": "crop_video", "arguments": {"start_time": 20, "end_time": 30}}
CROP_TEXT = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 20, "end_time": 30}}\n</tool_call>'
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TINY = tiny_config()
VISION = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
TINY_TENSORS = "c5a597bc827a765b928131ed9863001e6b78eb989f9ac9ea82eb2309b02c9a7a"
CHECKPOINT_NAMES = "44cb2bad2eb5c630c5d68f19333b4b642397866cde4e85b9e6f2967267cddc73"


@pytest.fixture(scope="module")
def tokenizer(tiny_hf):
    return transformers.AutoTokenizer.from_pretrained(tiny_hf)


def hf_inputs(tiny_hf, tokenizer, image):
    vision = pil_processing.Qwen2VLImageProcessorPil.from_pretrained(tiny_hf)(images=[image], return_tensors="pt")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What color is it?"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    num_tokens = int(vision["image_grid_thw"].prod()) // 4
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * num_tokens), return_tensors="pt")["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **vision)


def test_default_model_is_small_and_its_files_agree_with_its_config(tiny_hf, tokenizer):
    config = config_from_hf(json.loads((tiny_hf / "config.json").read_text()))
    assert config == TINY
    assert 500_000 < num_params(config) < 1_100_000
    assert len(tokenizer) <= config.text.vocab_size <= 2048
    generation = transformers.GenerationConfig.from_pretrained(tiny_hf)
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "processor"),
    [("qwen3_vl", "Qwen3VLProcessor"), ("qwen2_5_vl", "Qwen2_5_VLProcessor"), ("qwen3_vl_moe", "Qwen3VLProcessor")],
)
def test_a_tiny_model_loads_in_transformers_and_is_exported_bit_for_bit(family, processor, tmp_path):
    hf, out = tmp_path / "hf", tmp_path / "out"
    config = make_tiny(hf, config=tiny_config(family))
    assert 500_000 < num_params(config) < 1_300_000
    auto_model = transformers.AutoModelForImageTextToText
    model, info = auto_model.from_pretrained(hf, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info  # no missing, unexpected or misshapen tensors
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 140, 3), np.uint8))
    inputs = hf_inputs(hf, transformers.AutoTokenizer.from_pretrained(hf), image)
    with torch.no_grad():
        expected = model.eval()(**inputs).logits[0].numpy()
    convert(hf, tmp_path / "ckpt")
    ids, media = inputs["input_ids"].numpy(), [inputs[name].numpy() for name in ("pixel_values", "image_grid_thw")]
    np.testing.assert_allclose(model_port.logits(model_port.load(tmp_path / "ckpt"), ids, *media), expected, atol=1e-4)
    export(tmp_path / "ckpt", out)
    assert (out / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
    assert json.loads((out / "preprocessor_config.json").read_text())["processor_class"] == processor


def test_the_tiny_qwen2_5_has_its_familys_tokens_template_and_patches(tmp_path):
    make_tiny(tmp_path / "hf", config=tiny_config("qwen2_5_vl"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert len(tokenizer.encode("<think>")) > 1 and len(tokenizer.encode("<tool_call>")) == 1
    inputs = hf_inputs(tmp_path / "hf", tokenizer, Image.new("RGB", (140, 200)))
    assert inputs["image_grid_thw"].tolist() == [[1, 14, 10]]  # 196 x 140 pixels in patches of 14
    assert tokenizer.decode(inputs["input_ids"][0]).startswith("<|im_start|>system\nYou are a helpful assistant.")


def test_the_tiny_qwen3_and_the_names_in_its_checkpoints_are_those_of_version_0_2(tiny_hf):
    """Files and checkpoints of versions without model families still load."""
    tensors = load_file(tiny_hf / "model.safetensors")
    parts = [f"{name} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}" for name, value in tensors.items()]
    assert hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest() == TINY_TENSORS
    paths = sorted(rule.path for rule in rules(TINY))
    assert hashlib.sha256("\n".join(paths).encode()).hexdigest() == CHECKPOINT_NAMES


def test_special_tokens_are_single_ids_in_the_published_order(tokenizer):
    ids = {token: tokenizer.encode(f"a{token}b")[1] for token in SPECIAL_TOKENS}
    assert tokenizer.convert_ids_to_tokens(list(ids.values())) == list(SPECIAL_TOKENS)
    first = ids["<|endoftext|>"]
    assert {token: ids[token] - first + PUBLISHED_FIRST_ID for token in PUBLISHED_IDS} == PUBLISHED_IDS
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    expected = (TINY.image_token_id, TINY.video_token_id, TINY.vision_start_token_id, TINY.vision_end_token_id)
    assert tuple(ids[name] for name in names) == expected


def test_decoding_without_special_tokens_shows_tool_calls_and_thinking(tokenizer):
    ids = tokenizer.encode("".join(SPECIAL_TOKENS))
    shown = [token for token in SPECIAL_TOKENS if token in SHOWN or re.match(r"<\|(fim|repo|file)_", token)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(shown)


@pytest.mark.slow
@settings(deadline=None, max_examples=300, database=None)
@given(st.lists(st.text() | st.sampled_from(SPECIAL_TOKENS) | st.integers(0, 10**6).map(str)).map("".join))
def test_any_text_survives_tokenization(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.slow
def test_words_of_the_miniature_world_and_numbers_below_a_thousand_are_single_tokens(tokenizer):
    pre_tokenize = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    pieces = [*pre_tokenize(TEXT), *((number, None) for number in SINGLE_TOKEN_NUMBERS)]
    assert [piece for piece, _ in pieces if piece not in tokenizer.get_vocab()] == []
    assert all(len(tokenizer.encode(number)) == 1 for number in SINGLE_TOKEN_NUMBERS)
    assert tokenizer.tokenize("123456") == ["123", "456"]
    for text in ("<0 seconds>", "start_time: 999", "12.5", "01:05", "(7)"):  # at any position in the text
        assert [token for token in tokenizer.tokenize(text) if token.isdigit()] == re.findall(r"\d+", text)


def test_answer_tags_are_ordinary_tokens_that_merge_with_neighbors(tokenizer):
    assert tokenizer.tokenize("<answer>B</answer>") == ["<", "answer", ">", "B", "</", "answer", ">"]
    assert ".</" in tokenizer.tokenize("B.</answer>")
    assert ">Ċ" in tokenizer.tokenize("</answer>\n")


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_template_renders_turns_and_media_in_order(tokenizer):
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "video", "video": "v.mp4"}, {"text": "b"}]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": content}]
    system, user = "<|im_start|>system\nS<|im_end|>\n", f"a{VISION['image']}{VISION['video']}b"
    expected = f"{system}<|im_start|>user\n{user}<|im_end|>\n"
    assert render(tokenizer, messages) == expected
    assert render(tokenizer, messages, add_generation_prompt=True) == expected + "<|im_start|>assistant\n"
    assert render(tokenizer, messages[1:]) == expected.removeprefix(system)
    assert render(tokenizer, messages[::-1]) == expected.removeprefix(system) + system
    urls = [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "video_url", "video_url": {"url": "u"}}]
    assert VISION["image"] + VISION["video"] in render(tokenizer, [{"role": "user", "content": urls}])


@pytest.mark.parametrize("system", [None, "S", [{"type": "text", "text": "S"}]])
def test_template_puts_the_tools_into_one_system_turn(tokenizer, system):
    tools = [{"type": "function", "function": {"name": name, "description": "é <b>"}} for name in ("f", "g")]
    first = [] if system is None else [{"role": "system", "content": system}]
    text = render(tokenizer, [*first, {"role": "user", "content": "q"}], tools=tools)
    assert text.startswith("<|im_start|>system\n# Tools\n" if system is None else "<|im_start|>system\nS\n\n# Tools\n")
    listed = re.search(r"\n<tools>\n(.*)\n</tools>\n", text, re.DOTALL)
    assert [json.loads(line) for line in listed[1].split("\n")] == tools
    assert "é <b>" in listed[1]  # not escaped
    assert text.endswith("\n</tool_call><|im_end|>\n<|im_start|>user\nq<|im_end|>\n")
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("arguments", [CROP["arguments"], json.dumps(CROP["arguments"])])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("content", ["", "text"])
def test_template_writes_tool_calls_as_json_blocks(tokenizer, arguments, wrapped, content):
    call = {"name": "crop_video", "arguments": arguments}
    call = {"type": "function", "function": call} if wrapped else call
    text = render(tokenizer, [{"role": "assistant", "content": content, "tool_calls": [call, call]}])
    blocks = [content, CROP_TEXT, CROP_TEXT] if content else [CROP_TEXT, CROP_TEXT]
    assert text == "<|im_start|>assistant\n" + "\n".join(blocks) + "<|im_end|>\n"


def test_template_merges_consecutive_tool_messages_into_one_user_turn(tokenizer):
    roles = ("tool", "tool", "assistant", "tool", "user", "tool")
    text = render(tokenizer, [{"role": role, "content": str(index)} for index, role in enumerate(roles)])
    response = "\n<tool_response>\n{}\n</tool_response>".format
    assert text == (
        f"<|im_start|>user{response(0)}{response(1)}<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
        f"<|im_start|>user{response(3)}<|im_end|>\n"
        "<|im_start|>user\n4<|im_end|>\n"
        f"<|im_start|>user{response(5)}<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("message", "complaint"),
    [({"role": "critic", "content": "x"}, "critic"), ({"role": "user", "content": [{"type": "audio"}]}, "audio")],
)
def test_the_template_rejects_unsupported_content(tokenizer, message, complaint):
    with pytest.raises(TemplateError, match=complaint):
        render(tokenizer, [message])


def test_another_seed_changes_every_matrix_and_nothing_else(tiny_hf, tmp_path):
    make_tiny(tmp_path / "other", seed=1)
    for file in tiny_hf.iterdir():
        if file.name not in ("model.safetensors", LIST_FILE):
            assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes(), file.name
    first, second = load_file(tiny_hf / "model.safetensors"), load_file(tmp_path / "other" / "model.safetensors")
    assert all((first[name] != second[name]).all() == (value.ndim > 1) for name, value in first.items())


def test_a_deeper_model_keeps_the_tensors_it_shares(tiny_hf, tmp_path):
    make_tiny(tmp_path / "deep", config=replace(TINY, text=replace(TINY.text, num_layers=5)))
    shallow, deep = load_file(tiny_hf / "model.safetensors"), load_file(tmp_path / "deep" / "model.safetensors")
    assert shallow.keys() < deep.keys()
    assert all((deep[name] == value).all() for name, value in shallow.items())


def test_config_dtype_and_pixel_bounds_can_be_chosen(tmp_path):
    text = replace(TINY.text, num_layers=3, width=40, vocab_size=1801)
    vision = replace(TINY.vision, num_layers=5, out_width=40, deepstack_layers=(1, 4), patch_px=14)
    odd = replace(TINY, text=text, vision=vision, tie_embeddings=False)
    given = replace(odd, image_token_id=7)  # the tokenizer determines it
    written = make_tiny(tmp_path / "odd", config=given, dtype="bfloat16", min_pixels=28 * 28, max_pixels=56 * 56)
    assert written == odd
    assert {value.dtype for value in load_file(tmp_path / "odd" / "model.safetensors").values()} == {BFLOAT16}
    assert config_from_hf(json.loads((tmp_path / "odd" / "config.json").read_text())) == written
    contract = VisionContract.from_hf(tmp_path / "odd")
    assert (contract.patch_px, contract.min_pixels, contract.max_pixels) == (14, 28 * 28, 56 * 56)


def test_video_bounds_do_not_resize_frames_within_the_image_bounds(tiny_hf):
    image = json.loads((tiny_hf / "preprocessor_config.json").read_text())
    video = json.loads((tiny_hf / "video_preprocessor_config.json").read_text())
    assert image["size"]["longest_edge"] == MAX_PIXELS
    assert video["size"]["shortest_edge"] <= video["min_frames"] * 32 * 32
    assert video["size"]["longest_edge"] == video["max_frames"] * MAX_PIXELS


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (dict(dtype="int8"), "dtype 'int8' is not one of float32"),
        (dict(seed=-1), "seed -1 is negative"),
        (dict(min_pixels=9, max_pixels=8), "min_pixels 9 and max_pixels 8"),
        (dict(config=replace(TINY, text=replace(TINY.text, vocab_size=131))), "vocab_size 131 is smaller than"),
    ],
)
def test_invalid_options_are_rejected_before_writing(tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_tiny(tmp_path / "model", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_writes_the_same_bytes_or_on_a_full_disk_nothing(tiny_hf, tmp_path):
    def run(name, max_file_blocks):
        limited = ["sh", "-c", f'ulimit -f {max_file_blocks}; exec "$@"', "sh"]
        command = [*limited, sys.executable, "-m", "model_port.tiny", "--dst", tmp_path / name]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, err = run("made", "unlimited")
    assert (code, err) == (0, "") and "1.04 million parameters" in out
    assert run("full", 200) == (1, "", f"error: {tmp_path / 'full'}: File too large\n")  # in the middle of the weights
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    for file in tiny_hf.iterdir():
        assert file.name == LIST_FILE or (tmp_path / "made" / file.name).read_bytes() == file.read_bytes(), file.name
