"""Writes a tiny random model as a Hugging Face directory.

Architecture, file formats and special tokens equal the published ones. The size suits tests and training on two CPU
cores.

    python -m model_port.tiny --dst DIR [--seed 0] [--family qwen3_vl]

The same seed gives the same bytes. Each tensor is drawn from the seed and its name, so an additional tensor does not
change the others.
"""

import argparse
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from model_port.architecture import TINY_WIDTH, TextConfig, Tiny
from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.config import DTYPES, FAMILIES, ModelConfig, config_to_hf, parse_dtype
from model_port.output_dir import output_directory
from model_port.qwen2_5_vl import tiny as qwen2_5_vl
from model_port.qwen3_vl import tiny as qwen3_vl
from model_port.qwen3_vl_moe import tiny as qwen3_vl_moe
from model_port.safetensors_io import SINGLE_FILE, safetensors_writer
from model_port.weights import in_words, num_params, rules

DEFAULT_FAMILY = "qwen3_vl"
TINY: dict[str, Tiny] = {
    DEFAULT_FAMILY: qwen3_vl.TINY,
    "qwen3_vl_moe": qwen3_vl_moe.TINY,
    "qwen2_5_vl": qwen2_5_vl.TINY,
}

# The training recipe's bounds. The published minimum of 65536 would enlarge every frame below 256 x 256.
MIN_PIXELS = 784
MAX_PIXELS = 50_176

# All tokens that the published tokenizer adds to its base vocabulary, in the same order, so ids differ by a constant.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
FIRST_SHOWN_TOKEN = "<tool_call>"  # from this token on, `special` is false, so decoding without special tokens keeps it

# Qwen2's pre-tokenizer. DIFFERS: Qwen2 splits digits, but here up to three digits stay together, because a model of
# this size only learns to copy a time if the time is one token.
PRETOKENIZE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SINGLE_TOKEN_NUMBERS = (*map(str, range(1000)), *(f"{n:02d}" for n in range(10)))  # two digits for MM:SS

# Every word of this text becomes one token. Special tokens are absent, because they are never split. `<answer` is also
# absent, so that the answer tags are tokenized as in the real vocabulary: `<`, `answer`, `>`, with a closing tag that
# shares tokens with its neighbors (`.</`, `>\n`).
TEXT = """\
You are a helpful assistant. You watch a long video and answer a question about it. The video lasts 64 seconds.
You see an overview of 16 frames, each after its time. 12.0 seconds> 3.5 seconds> Use the tool to look closer.
What is the color of the patch between 20 and 30 seconds? What colour does the event have? When does it happen?
Which color was shown first, and which was shown second? Was it in the first half or the second half?
Options:
A. red
B. green
C. blue
D. yellow
E. white
F. black
The patch is red. The event is green, then blue, yellow, orange, purple, pink, brown, gray, white or black.
red green blue yellow orange purple pink brown gray cyan white black square circle color colour
Red Green Blue Yellow Orange Purple Pink Brown Gray Cyan White Black
Summarize this segment of the video in one sentence. The segment shows a red square from 24.0 to 26.0 seconds.
There is no event in this segment. Nothing happens between 40 and 48 s. No color was seen.
The event happens in the 24.0 - 26.0 seconds.
The overview shows no event, so I need to look at the window from 20 to 30 seconds. I will call the tool.
{"name": "crop_video", "arguments": {"video_path": "video.mp4", "start_time": 20, "end_time": 30}}
{"name":"crop_video","arguments":{"video_path":"video_0.mp4","start_time":20.5,"end_time":30.0}}
Summary: the frames show a blue patch at 25 seconds. Error: the window ends before it starts. Error: unknown tool.
The summary said the color is blue, so the answer is B. Now I can answer. I know when it happens.
answer.</answer]</answer)</answer"</answer></answer><
answer>

tool_code crop_video(start_time=20, end_time=30)
Think first, then call the tool or answer. Give only the letter of the option. Question: Answer: Duration: Time:
{"type": "function", "function": {"name": "crop_video", "description": "Look at a part of the video.", "parameters":
{"type": "object", "properties": {"start_time": {"type": "number"}, "end_time": {"type": "number"}, "video_path":
{"type": "string"}}, "required": ["video_path", "start_time", "end_time"]}}}
system
user
assistant
tool
answer
"""

MAX_BASE_TOKENS = 2_000  # at most 2048 with the special tokens
VOCAB_MULTIPLE = 64  # splits evenly over small meshes; the published vocabulary also has unused rows at its end


@cache
def _tokenizer_json(family: str) -> str:
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_BASE_TOKENS,  # more than needed, so training continues until every word is one token
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    # DIFFERS: Qwen2 first normalizes to NFC, which changes decomposed text; here any text decodes to the same bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT, *SINGLE_TOKEN_NUMBERS], trainer)
    first_shown = SPECIAL_TOKENS.index(FIRST_SHOWN_TOKEN)
    for index, token in enumerate(token for token in SPECIAL_TOKENS if token not in TINY[family].absent_tokens):
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=index < first_shown)])
    return tokenizer.to_str(pretty=True)


def tiny_tokenizer(family: str = DEFAULT_FAMILY) -> Tokenizer:
    """Returns the tokenizer of a family's tiny models, which does not depend on the seed."""
    return Tokenizer.from_str(_tokenizer_json(family))


def tiny_config(family: str = DEFAULT_FAMILY) -> ModelConfig:
    """Returns the config of a tiny model: about a million parameters, half of them in the text layers."""
    vocab_size = -(-tiny_tokenizer(family).get_vocab_size() // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    parts = TINY[family]
    text = TextConfig(
        num_layers=4,
        width=TINY_WIDTH,
        ffn_width=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=vocab_size,
        rope_theta=10_000.0,  # contexts are short, so the published theta would leave most frequencies unused
        mrope_sections=parts.mrope_sections,
        max_positions=32_768,
    )
    text = replace(text, **parts.traits)
    # The published 0.02 is for widths in the thousands, and trains slowly at this width.
    return with_tokenizer_ids(ModelConfig(text, parts.vision, tie_embeddings=True, initializer_range=0.05))


def with_tokenizer_ids(config: ModelConfig) -> ModelConfig:
    """Returns the config with the tiny tokenizer's token ids. Raises if its vocabulary is too small."""
    ids = tiny_tokenizer(config.family).get_vocab()
    if config.text.vocab_size < len(ids):
        raise ValueError(f"text.vocab_size {config.text.vocab_size} is smaller than the tiny tokenizer's {len(ids)}")
    return replace(
        config,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def make_tiny(
    dst: str | Path,
    seed: int = 0,
    config: ModelConfig | None = None,
    dtype: str = "float32",
    *,
    min_pixels: int = MIN_PIXELS,
    max_pixels: int = MAX_PIXELS,
    force: bool = False,
) -> ModelConfig:
    """Writes a tiny model to `dst` atomically. Returns its config, which is `config` with the tokenizer's ids.

    `min_pixels` and `max_pixels` bound the area of a frame that the processor resizes. `force` replaces an existing
    model.
    """
    storage = parse_dtype(dtype)
    if seed < 0:
        raise ValueError(f"seed {seed} is negative")
    if not 0 < min_pixels <= max_pixels:
        raise ValueError(f"min_pixels {min_pixels} and max_pixels {max_pixels} must be positive and ascending")
    config = tiny_config() if config is None else with_tokenizer_ids(config)
    with output_directory(dst, force=force) as directory:
        _write_weights(directory / SINGLE_FILE, config, seed, storage)
        (directory / "tokenizer.json").write_text(_tokenizer_json(config.family), encoding="utf-8")
        (directory / "chat_template.jinja").write_text(TINY[config.family].chat_template, encoding="utf-8")
        for name, content in {
            "config.json": config_to_hf(config, dtype),
            "generation_config.json": _generation_config(config.family),
            "tokenizer_config.json": _tokenizer_config(config),
            "preprocessor_config.json": _image_processor(config, min_pixels, max_pixels),
            "video_preprocessor_config.json": _video_processor(config, min_pixels, max_pixels),
        }.items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return config


def _write_weights(path: Path, config: ModelConfig, seed: int, storage: np.dtype) -> None:
    shapes = {name: rule.hf_shape for rule in rules(config) for name in rule.hf_names}

    def draw(name: str) -> np.ndarray:
        return _initial(name, shapes[name], seed, config.initializer_range).astype(storage)

    names, num_threads = [*shapes], os.cpu_count() or 1
    with (
        ThreadPoolExecutor(num_threads) as pool,
        safetensors_writer(path, {name: (storage, shape) for name, shape in shapes.items()}) as write,
    ):
        for start in range(0, len(names), num_threads):  # in parts, because the whole model may not fit in memory
            for tensor in pool.map(draw, names[start : start + num_threads]):
                write(tensor)


def _initial(name: str, shape: tuple[int, ...], seed: int, std: float) -> np.ndarray:
    """Draws a tensor's initial values, as in transformers (modeling_utils.py, PreTrainedModel._init_weights)."""
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:  # the scale of a norm
        return np.ones(shape, np.float32)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return generator.standard_normal(shape, np.float32) * np.float32(std)


def _generation_config(family: str) -> dict[str, Any]:
    """Returns the sampling defaults of the published Instruct models."""
    token_id = tiny_tokenizer(family).token_to_id
    return {
        "bos_token_id": token_id("<|endoftext|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "eos_token_id": [token_id("<|im_end|>"), token_id("<|endoftext|>")],
        "do_sample": True,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.0,
        "temperature": 0.7,
    }


def _tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the tokenizer's config, without the added tokens, which are in tokenizer.json."""
    return {
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": config.text.max_positions,
        "pad_token": "<|endoftext|>",
        # DIFFERS: for a Qwen2Tokenizer, transformers 5 ignores tokenizer.json's pre-tokenizer and uses its own, which
        # splits digits. This class uses tokenizer.json unchanged, in transformers 4 and 5.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _image_processor(config: ModelConfig, min_pixels: int, max_pixels: int) -> dict[str, Any]:
    vision, parts = config.vision, TINY[config.family]
    return {
        "size": {"longest_edge": max_pixels, "shortest_edge": min_pixels},  # areas in pixels, despite the names
        "patch_size": vision.patch_px,
        "temporal_patch_size": vision.temporal_patch_frames,
        "merge_size": vision.merge,
        "image_mean": list(parts.pixel_mean),
        "image_std": list(parts.pixel_std),
        "processor_class": FAMILIES[config.family].processor_class,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }


def _video_processor(config: ModelConfig, min_pixels: int, max_pixels: int) -> dict[str, Any]:
    """Returns the video processor's config. Its bounds are areas of all frames of a video together."""
    min_frames, max_frames = 4, 768  # the processor class's defaults
    settings = _image_processor(config, min_frames * min_pixels, max_frames * max_pixels)
    del settings["image_processor_type"]
    return {
        **settings,
        "min_frames": min_frames,
        "max_frames": max_frames,
        "video_processor_type": TINY[config.family].video_processor,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("model_port.tiny"),
        description="Writes a tiny random model in Hugging Face format, tokenizer and processor included.",
    )
    parser.add_argument("--dst", required=True, metavar="DIR", help="output directory; must not exist")
    parser.add_argument("--family", choices=TINY, default=DEFAULT_FAMILY, help="model_type (default qwen3_vl)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights (default float32)")
    parser.add_argument("--force", action="store_true", help="replace an existing model directory")
    add_debug_flag(parser)
    args = parser.parse_args()
    config = make_tiny(args.dst, args.seed, tiny_config(args.family), dtype=args.dtype, force=args.force)
    print(f"{args.dst}: {in_words(num_params(config))} parameters, vocabulary {config.text.vocab_size}")


if __name__ == "__main__":
    run_cli(main)
