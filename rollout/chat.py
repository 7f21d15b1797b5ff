"""Text to ids and back, and everything of a dialogue that no model writes: prompts, role headers, tool responses.

A prompt is rendered once, by the chat template of the tokenizer. What the environment adds to a turn is what the same
template would put after it, so that for an ordinary dialogue the ids of a ledger are those of the template applied to
the whole. Text from outside, a question or a report, can never become a token that was added to the vocabulary: such
tokens open and close turns, calls and pictures.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from rollout.templates import render

IMAGE = "<|image_pad|>"
VISUAL_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", IMAGE, "<|video_pad|>")
TURN_END = "<|im_end|>"
STOP_TOKENS = (TURN_END, "<|endoftext|>")
MAX_FILE_BYTES = 64 * 2**20  # six times the published tokenizer.json
SPOKEN = "\ue000spoken\ue000"  # stands for what the assistant said; no template has it, and what follows may


def _characters(data: bytes) -> list[int]:
    """For every byte, the number of the character it belongs to, when what is not UTF-8 decodes to replacements."""
    numbers: list[int] = []
    at = num_chars = 0
    while at < len(data):
        try:
            valid, wrong = data[at:].decode(), 0
        except UnicodeDecodeError as problem:  # its range becomes one replacement
            valid, wrong = data[at : at + problem.start].decode(), problem.end - problem.start
        for character in valid:
            numbers += [num_chars] * len(character.encode())
            num_chars += 1
        numbers += [num_chars] * wrong
        num_chars += wrong > 0
        at = len(numbers)
    return numbers


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in the vocabularies of byte-level tokenizers."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


BYTES = {character: byte for byte, character in byte_characters().items()}


class Chat:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str, source: str = "the tokenizer"):
        self.tokenizer = tokenizer
        self.source = source
        self._template = chat_template
        self.stop_ids = tuple(self._id(token) for token in STOP_TOKENS)
        self.turn_end_id, self.image_id = self._id(TURN_END), self._id(IMAGE)
        self.call_end_id = self._id("</tool_call>")
        self.visual_ids = frozenset(self._id(token) for token in VISUAL_TOKENS)
        self._added_text = {
            token: added.content.encode() for token, added in tokenizer.get_added_tokens_decoder().items()
        }
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._added = _any_of(added)
        self._control = _any_of([token for token in added if token.startswith("<|")])
        self._check_template()

    @classmethod
    def from_hf(cls, directory: str | Path) -> "Chat":
        """From the tokenizer.json and chat template of a Hugging Face directory."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{directory} has no tokenizer.json; save the model's tokenizer there in its fast form")
        return cls(_read_tokenizer(path), _read_template(directory), str(directory))

    def encode(self, text: str) -> np.ndarray:
        """Ids of text that we wrote; the names of added tokens become those tokens."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """All of the text, to be read and shown; never to be encoded again."""
        return self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def spans(self, ids: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
        """Where the characters of `decode(ids)` come from, token by token.

        A character that several tokens spell belongs to each of them.
        """
        pieces = [self._bytes_of(int(token)) for token in ids]
        character_of = _characters(b"".join(pieces))
        num_chars = character_of[-1] + 1 if character_of else 0
        spans, at = [], 0
        for piece in pieces:
            of_piece = character_of[at : at + len(piece)]
            at += len(piece)
            spans.append((of_piece[0], of_piece[-1] + 1) if piece else (num_chars, num_chars))
        return spans

    def _bytes_of(self, token: int) -> bytes:
        added = self._added_text.get(token)
        if added is not None:
            return added
        piece = self.tokenizer.id_to_token(token)  # None for the unused rows at the end of a vocabulary
        return b"" if piece is None else bytes(BYTES[character] for character in piece)

    def escape(self, text: str) -> str:
        """The text with a space in every name of an added token, so that its ids are ordinary ones."""
        return self._added.sub(_broken, _encodable(text))

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> np.ndarray:
        """A dialogue up to where the assistant begins to speak. Its texts must be ours or `escape`d."""
        return self.encode(self._render(messages, tools, add_generation_prompt=True))

    def encode_turn(self, text: str) -> np.ndarray:
        """A turn that somebody else wrote for the assistant: its tags are tokens, but it shows and ends nothing."""
        return self.encode(self._control.sub(_broken, _encodable(text)))

    def after_turn(self, ids: np.ndarray, responses: Sequence[str]) -> np.ndarray:
        """What follows the assistant's turn: its end, if cut off before, tool responses, and the assistant's header."""
        return self.after(ids, [{"role": "tool", "content": self.escape(response)} for response in responses])

    def after(self, ids: np.ndarray, messages: list[dict[str, Any]]) -> np.ndarray:
        """The same for any messages up to where the assistant speaks again; their texts must be ours or `escape`d."""
        after = self._after_spoken(messages)
        return self.encode(after.removeprefix(TURN_END) if self.ended(ids) else after)

    def after_last_turn(self, ids: np.ndarray) -> np.ndarray:
        """Nothing, or the end of a turn that was cut off."""
        return np.array([] if self.ended(ids) else [self.turn_end_id], np.int32)

    def ended(self, ids: np.ndarray) -> bool:
        return len(ids) > 0 and int(ids[-1]) == self.turn_end_id

    def _after_spoken(self, messages: list[dict[str, Any]]) -> str:
        spoken = [{"role": "user", "content": ""}, {"role": "assistant", "content": SPOKEN}]
        return self._render([*spoken, *messages], add_generation_prompt=True).partition(SPOKEN)[2]

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, add_generation_prompt: bool
    ) -> str:
        try:
            return render(self._template, messages, tools, add_generation_prompt=add_generation_prompt)
        except ValueError as problem:
            raise ValueError(f"the chat template of {self.source} cannot render this dialogue: {problem}") from None

    def _id(self, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(f"{self.source} has no token {token}; it is not the tokenizer of a Qwen3-VL")
        return number

    def _check_template(self) -> None:
        after = self._after_spoken([{"role": "tool", "content": "x"}])
        if not after.startswith(TURN_END):
            raise ValueError(
                f"the chat template of {self.source} ends an assistant's turn with {after[:20]!r}, expected {TURN_END}"
            )


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Longest first, as the tokenizer matches them."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))


def _encodable(text: str) -> str:
    """No encoding has a lone surrogate, and JSON can spell one."""
    return text.encode(errors="replace").decode()


def _broken(token: re.Match[str]) -> str:
    return token.group()[0] + " " + token.group()[1:]


def _read_tokenizer(path: Path) -> Tokenizer:
    text = _read(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as problem:  # the library raises no other
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


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"{path} is not valid JSON: {problem}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def _read(path: Path) -> str:
    if (num_bytes := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {num_bytes} bytes, more than {MAX_FILE_BYTES}; is it a file of the model?")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(f"{path} is not text: {problem}") from None
