"""A Hugging Face model's files other than weights: config, tokenizer, processor, chat template.

Published checkpoints describe their processors in preprocessor_config.json and video_preprocessor_config.json, which
all libraries read. Transformers 5 writes, and prefers, a single processor_config.json, from which the directories that
we write get the other two; but they never get that file, because transformers before 4.56 cannot load a directory that
has it. The chat template can also be in three files, and is written to all of them.
"""

import json
import re
from pathlib import Path
from typing import Any

from model_port.config import FAMILIES, read_hf_config
from model_port.json_files import Section, parse_object, read_bytes
from model_port.processing import FLAT_FILES

CONFIG_FILE = "config.json"
DTYPE_KEYS = {"dtype", "torch_dtype"}
BASE_MODEL_KEY = "_name_or_path"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
PROCESSOR_FILE = "processor_config.json"
TEMPLATE_FILE = "chat_template.jinja"
OLD_TEMPLATE_FILE = "chat_template.json"

RECIPE_FILE = "paravt.json"  # the prompts and frame sizes of the run that trained the model

# A model's files besides weights and card. An allow-list, because users keep tokens and notes in the same directory.
SIDE_FILES = (
    *(CONFIG_FILE, "generation_config.json", "configuration.json"),
    *(TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, "vocab.json", "merges.txt", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE, OLD_TEMPLATE_FILE),
    *(PROCESSOR_FILE, *FLAT_FILES.values()),
    RECIPE_FILE,
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md"),
)
VOCABULARIES = (TOKENIZER_FILE, "vocab.json")  # not parsed here, because they are large and the tokenizer checks them
CARD_FILE = "README.md"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")

# Class names differ between versions of transformers without a difference in behavior.
NAME_KEYS = {"processor_class", "image_processor_type", "video_processor_type"}


def read_side_files(directory: Path) -> dict[str, bytes]:
    """Reads a model's files besides weights and card, and adds the files that are missing for some readers."""
    files = {name: read_bytes(directory / name) for name in sorted(SIDE_FILES) if (directory / name).is_file()}
    for name in files:
        if name.endswith(".json") and name not in VOCABULARIES:
            _parse(files, name, directory)
    return _with_chat_template(_with_processor_files(files, directory), directory)


def no_tokenizer(directory: str | Path) -> str:
    """Returns an error's text if the directory has no tokenizer, otherwise ""."""
    found = any((Path(directory) / name).is_file() for name in VOCABULARIES)
    return "" if found else f"{directory} has no tokenizer ({' or '.join(VOCABULARIES)})"


def write_side_files(files: dict[str, bytes], directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)


def with_dtype(files: dict[str, bytes], dtype: str) -> dict[str, bytes]:
    """Returns the files with every dtype in config.json replaced by `dtype`, or added if there is none."""
    config = parse_object(files[CONFIG_FILE], CONFIG_FILE)
    if not DTYPE_KEYS & set(config):
        config["dtype"] = dtype
    return {**files, CONFIG_FILE: _to_json(_replace_dtypes(config, dtype))}


def base_model(directory: Path) -> str | None:
    """Returns the base model's hub id, from the directory's path in the hub's cache or our note in its config."""
    cached = HUB_CACHE.search(f"{directory.absolute()}/")
    if cached is not None:
        return "/".join(cached.groups())
    noted = str(read_hf_config(directory).get(BASE_MODEL_KEY) or "")
    return noted if HUB_ID.fullmatch(noted) else None


def with_base_model(files: dict[str, bytes], hub_id: str | None) -> dict[str, bytes]:
    """Returns the files with the hub id added to config.json under transformers' key."""
    if hub_id is None:
        return files
    return {**files, CONFIG_FILE: _to_json({**parse_object(files[CONFIG_FILE], CONFIG_FILE), BASE_MODEL_KEY: hub_id})}


def with_pixel_bounds(files: dict[str, bytes], min_pixels: int, max_pixels: int) -> dict[str, bytes]:
    """Returns the files with the bounds of an image's area replaced in every file that has them.

    Under two names, because transformers 4 ignores `size` if torchvision is not installed.
    """
    name = "image_processor"
    bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    changed = dict(files)
    for file in (FLAT_FILES[name], PROCESSOR_FILE):
        content = parse_object(files.get(file, b"{}"), file)
        section = content.get(name) if file == PROCESSOR_FILE else content
        if section:
            section |= {"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels}, **bounds}
            changed[file] = _to_json(content)
    return changed


def _parse(files: dict[str, bytes], name: str, directory: Path) -> dict[str, Any]:
    """Parses a file; returns an empty object if it does not exist."""
    return parse_object(files.get(name, b"{}"), directory / name)


def _to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _replace_dtypes(section: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        key: _replace_dtypes(value, dtype) if isinstance(value, dict) else dtype if key in DTYPE_KEYS else value
        for key, value in section.items()
    }


def _with_processor_files(files: dict[str, bytes], directory: Path) -> dict[str, bytes]:
    nested, added = _parse(files, PROCESSOR_FILE, directory), {}
    family = FAMILIES.get(str(_parse(files, CONFIG_FILE, directory).get("model_type")))
    usual = {} if family is None else {"processor_class": nested.get("processor_class", family.processor_class)}
    for name in filter(nested.__contains__, FLAT_FILES):
        flat = _parse(files, FLAT_FILES[name], directory)
        Section(str(directory / PROCESSOR_FILE), nested).section(name)
        if flat:
            _check_agreement(nested[name], flat, directory, name, FLAT_FILES[name])
        else:
            added[FLAT_FILES[name]] = _to_json(usual | nested[name])
    return {**files, **added}


def _check_agreement(nested: dict[str, Any], flat: dict[str, Any], directory: Path, name: str, flat_file: str) -> None:
    """Raises if the two files differ: transformers 5 and older libraries read different files, and must agree."""
    for key in sorted((set(nested) & set(flat)) - NAME_KEYS):
        values = nested[key], flat[key]
        if None not in values and values[0] != values[1]:  # transformers writes null for unset values
            raise ValueError(
                f"{directory}: {PROCESSOR_FILE} has {name}.{key}={values[0]!r}, {flat_file} has {values[1]!r}; "
                f"make them equal or delete one of the two files"
            )


def _with_chat_template(files: dict[str, bytes], directory: Path) -> dict[str, bytes]:
    """Adds the template to the files that lack it. A template in the tokenizer's config stays, for older readers."""
    tokenizer = _parse(files, TOKENIZER_CONFIG_FILE, directory)
    old = _parse(files, OLD_TEMPLATE_FILE, directory).get("chat_template")
    try:
        new = files[TEMPLATE_FILE].decode() if TEMPLATE_FILE in files else None
    except UnicodeDecodeError as problem:
        raise ValueError(f"{directory / TEMPLATE_FILE} is not text: {problem}") from None
    if old is not None and new is not None and old != new:
        raise ValueError(
            f"{directory}: {OLD_TEMPLATE_FILE} and {TEMPLATE_FILE} hold different chat templates, and readers disagree "
            f"on which one to use; delete one of the two files"
        )
    templates = {OLD_TEMPLATE_FILE: old, TEMPLATE_FILE: new, TOKENIZER_CONFIG_FILE: tokenizer.get("chat_template")}
    template = next((text for text in templates.values() if isinstance(text, str)), None)
    if template is None:
        return files
    everywhere = {OLD_TEMPLATE_FILE: _to_json({"chat_template": template}), TEMPLATE_FILE: template.encode()}
    if tokenizer:
        everywhere[TOKENIZER_CONFIG_FILE] = _to_json({**tokenizer, "chat_template": template})
    return {**files, **{name: content for name, content in everywhere.items() if templates[name] is None}}
