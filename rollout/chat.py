"""Converts text to ids and back, and builds the parts of a dialogue that the model does not write.

The tokenizer's chat template renders a prompt once. After each turn the environment appends the text that the template
would put there. For an ordinary dialogue the ledger's ids therefore equal the template's output for the whole dialogue.
Text from outside, such as a question or a report, never encodes to added tokens, because these open and close turns,
calls and pictures.
"""

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from rollout.parts import Response, content_of
from rollout.templates import render
from rollout.tools import make_schema
from rollout.tools_text import with_responses, with_tools

IMAGE = "<|image_pad|>"
PICTURE = f"<|vision_start|>{IMAGE}<|vision_end|>"
TOKEN_PX = 32  # side of the square of pixels that becomes one token in Qwen3-VL
VISUAL_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", IMAGE, "<|video_pad|>")
TURN_END = "<|im_end|>"
TAGS = ("<think>", "</think>", "<tool_response>", "</tool_response>")  # plain text in Qwen2.5-VL, tokens in Qwen3-VL
STOP_TOKENS = (TURN_END, "<|endoftext|>")
MAX_FILE_BYTES = 64 * 2**20  # six times the published tokenizer.json
TURN_PROBE = "\ue000spoken\ue000"  # placeholder for an assistant's turn; occurs in no template
TOOL_PROBE = "\ue000probe\ue000"  # placeholder for a tool or its response


def _characters(data: bytes) -> list[int]:
    """Maps every byte to the index of its character in the decoded text, with U+FFFD for invalid UTF-8."""
    numbers: list[int] = []
    at = num_chars = 0
    while at < len(data):
        try:
            valid, wrong = data[at:].decode(), 0
        except UnicodeDecodeError as problem:  # the invalid range becomes one replacement character
            valid, wrong = data[at : at + problem.start].decode(), problem.end - problem.start
        for character in valid:
            numbers += [num_chars] * len(character.encode())
            num_chars += 1
        numbers += [num_chars] * wrong
        num_chars += wrong > 0
        at = len(numbers)
    return numbers


def byte_characters() -> dict[int, str]:
    """Maps each byte to the printable character that stands for it in a byte-level tokenizer's vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(unprintable)}


BYTES = {character: byte for byte, character in byte_characters().items()}


class Chat:
    """A tokenizer and its chat template."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: str, source: str = "the tokenizer", token_px: int = TOKEN_PX
    ):
        """`source` names the tokenizer in errors; `token_px` is the side of the square of pixels that is one token."""
        self.tokenizer = tokenizer
        self.source = source
        self.token_px = token_px
        self._template = chat_template
        self.stop_ids = tuple(self._id(token) for token in STOP_TOKENS)
        self.turn_end_id, self.image_id = self._id(TURN_END), self._id(IMAGE)
        self.call_end_id = self._id("</tool_call>")
        self.visual_ids = frozenset(self._id(token) for token in VISUAL_TOKENS)
        added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._added_bytes = {token: text.encode() for token, text in added.items()}
        self._added = _any_of({*added.values(), *TAGS})
        self._control = _any_of([text for text in added.values() if text.startswith("<|")])
        after = self._after_assistant([{"role": "tool", "content": "x"}])
        if not after.startswith(TURN_END):
            raise ValueError(
                f"the chat template of {self.source} ends an assistant's turn with {after[:20]!r}, expected {TURN_END}"
            )

    @classmethod
    def from_hf(cls, directory: str | Path) -> "Chat":
        """Reads tokenizer.json and the chat template of a Hugging Face directory."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{directory} has no tokenizer.json; save the model's fast tokenizer there")
        return cls(_read_tokenizer(path), _read_template(directory), str(directory), _read_token_px(directory))

    def encode(self, text: str) -> np.ndarray:
        """Encodes trusted text; names of added tokens encode to these tokens."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids for display and parsing; the result must never be encoded again."""
        return self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def spans(self, ids: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """Returns each token's range of characters in `decode(ids)`.

        If several tokens spell a character together, the character is in the range of each.
        """
        pieces = [self._bytes_of(int(token)) for token in ids]
        character_of = _characters(b"".join(pieces))
        num_chars = character_of[-1] + 1 if character_of else 0
        spans, start = [], 0
        for piece in pieces:
            characters = character_of[start : start + len(piece)]
            start += len(piece)
            spans.append((characters[0], characters[-1] + 1) if piece else (num_chars, num_chars))
        return spans

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added_bytes:
            return self._added_bytes[token]
        piece = self.tokenizer.id_to_token(token)  # None for unused rows at the end of a vocabulary
        return b"" if piece is None else bytes(BYTES[character] for character in piece)

    def escape(self, text: str) -> str:
        """Inserts a space into names of added tokens, so that they encode to ordinary tokens."""
        return self._added.sub(_spaced, _encodable(text))

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> np.ndarray:
        """Returns the ids of a dialogue up to the assistant's next turn. Texts must be trusted or `escape`d."""
        return self.encode(self._render(messages, tools, add_generation_prompt=True))

    def ids(
        self, messages: list[dict[str, Any]], num_pictures: int, tools: list[dict[str, Any]] | None = None
    ) -> np.ndarray:
        """Like `prompt`, but raises a ValueError unless the ids have exactly `num_pictures` placeholders."""
        ids = self.prompt(messages, tools)
        if (num_shown := np.count_nonzero(ids == self.image_id)) != num_pictures:
            raise ValueError(f"the chat template of {self.source} renders {num_shown} of {num_pictures} pictures")
        return ids

    def encode_turn(self, text: str) -> np.ndarray:
        """Encodes an assistant's turn from a dataset: tags become tokens, but control and vision tokens do not."""
        return self.encode(self.escape_control(text))

    def escape_control(self, text: str) -> str:
        """Like `escape`, but tags such as `<think>` and `<tool_call>` still encode to their tokens."""
        return self._control.sub(_spaced, _encodable(text))

    def after_turn(self, ids: np.ndarray, responses: Sequence[Response]) -> np.ndarray:
        """Returns the ids to append after an assistant's turn, with one placeholder per picture of the responses.

        They have the turn's end (if the turn was cut off), the tool responses and the header of the next turn.
        """
        return self.after(
            ids, [{"role": "tool", "content": content_of(response, self.escape)} for response in responses]
        )

    def after(self, ids: np.ndarray, messages: list[dict[str, Any]]) -> np.ndarray:
        """Like `after_turn`, but for any messages. Their texts must be trusted or `escape`d."""
        has_pictures = any(isinstance(message["content"], list) for message in messages)
        if has_pictures and not self._shows_pictures:
            messages = with_responses(messages)
        after = self._after_assistant(messages)
        return self.encode(after.removeprefix(TURN_END) if self.ended(ids) else after)

    @cached_property
    def _shows_pictures(self) -> bool:
        """Whether the template renders pictures in tool responses, as Qwen3-VL's does."""
        content = [{"type": "text", "text": TOOL_PROBE}, {"type": "image"}]
        try:
            return f"{TOOL_PROBE}{PICTURE}" in self._after_assistant([{"role": "tool", "content": content}])
        except ValueError:
            return False

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the template describes tools, as Qwen3-VL's does; Qwen2.5-VL's ignores them."""
        try:
            tool = make_schema(TOOL_PROBE, TOOL_PROBE)
            return TOOL_PROBE in render(self._template, [{"role": "user", "content": ""}], [tool])
        except ValueError:
            return False

    def without_stop(self, ids: np.ndarray) -> np.ndarray:
        """Returns a turn's ids without the stop token at their end, if there is one."""
        return ids[:-1] if len(ids) and int(ids[-1]) in self.stop_ids else ids

    def ended(self, ids: np.ndarray) -> bool:
        return len(ids) > 0 and int(ids[-1]) == self.turn_end_id

    def _after_assistant(self, messages: list[dict[str, Any]]) -> str:
        """Renders the text that follows the content of an assistant's turn, with `messages` after the turn."""
        before = [{"role": "user", "content": ""}, {"role": "assistant", "content": TURN_PROBE}]
        return self._render([*before, *messages], add_generation_prompt=True).partition(TURN_PROBE)[2]

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, add_generation_prompt: bool
    ) -> str:
        if not self._shows_tools:
            messages, tools = with_responses(with_tools(messages, tools) if tools else messages), None
        try:
            return render(self._template, messages, tools, add_generation_prompt=add_generation_prompt)
        except ValueError as problem:
            raise ValueError(f"the chat template of {self.source} cannot render this dialogue: {problem}") from None

    def _id(self, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(f"{self.source} has no token {token}; it is not the tokenizer of a Qwen-VL model")
        return number


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the tokens, longest first, as the tokenizer does."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=lambda token: (-len(token), token))))


def _encodable(text: str) -> str:
    """Replaces lone surrogates, which JSON can contain but no encoding can."""
    return text.encode(errors="replace").decode()


def _spaced(token: re.Match[str]) -> str:
    return token.group()[0] + " " + token.group()[1:]


def _read_tokenizer(path: Path) -> Tokenizer:
    text = _read(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as problem:  # the library raises no more specific type
        raise ValueError(f"{path} is not a tokenizer: {problem}") from None
    if strange := set("".join(tokenizer.get_vocab(with_added_tokens=False))) - BYTES.keys():
        raise ValueError(f"{path} is not a byte-level tokenizer: its tokens have characters such as {min(strange)!r}")
    return tokenizer


def _read_template(directory: Path) -> str:
    jinja, old, config = (
        directory / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    )
    if jinja.is_file():
        return _read(jinja)
    for path in (old, config):
        template = _read_object(path).get("chat_template") if path.is_file() else None
        if isinstance(template, str):
            return template
    raise ValueError(f"{directory} has no chat template: neither {jinja.name}, nor one in {old.name} or {config.name}")


def _read_token_px(directory: Path) -> int:
    """Reads the side of a token's square of pixels from the image processor's settings; defaults to Qwen3-VL's."""
    nested, flat = directory / "processor_config.json", directory / "preprocessor_config.json"
    settings = _read_object(nested).get("image_processor") if nested.is_file() else None
    settings = settings if settings or not flat.is_file() else _read_object(flat)
    sizes = [settings.get(key) for key in ("patch_size", "merge_size")] if isinstance(settings, dict) else []
    patch_px, merge = (size if isinstance(size, int) and size > 0 else 0 for size in sizes or (0, 0))
    return patch_px * merge or TOKEN_PX


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"{path} is not valid JSON: {problem}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _read(path: Path) -> str:
    if (num_bytes := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {num_bytes} bytes, more than {MAX_FILE_BYTES}; is this the right file?")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is not text: {problem}") from None
