"""Parses one assistant turn: its tags, its well-formed prefix, and the first fault.

    turn      := <think> text </think> ( tool_call+ | <answer> text </answer> )
    tool_call := <tool_call> text </tool_call>

with white space between the parts. A text contains no tags, including `<tool_response>` and `<tool_code>`. Only the
environment writes `<tool_response>`. `<tool_code>` leaks from the base model's prior: the dispatcher executes such
calls, but the trained grammar does not accept them.

The parse is the longest prefix of the turn that the grammar accepts. The first fault is a misplaced, repeated or nested
tag, or text outside the parts. The last turn must be an answer turn, and all others tool turns.

Lines marked `Choice:` decide points that the specification leaves open.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

TAG = re.compile(r"<(/?)(think|tool_call|answer|tool_response|tool_code)>")
STRUCTURAL = ("think", "tool_call", "answer")
FOLLOWS = {"": ("think",), "think": ("tool_call", "answer"), "tool_call": ("tool_call",), "answer": ()}
MIN_THINK_CHARS = 10  # published
WORD = re.compile(r"[^\W_]+")


class Place(NamedTuple):
    """Characters `start` to `end` (exclusive) of a turn. `turn` is its number, from 0.

    An empty place at the end of the text is the token that ended the turn.
    """

    turn: int
    start: int
    end: int

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.end


@dataclass(frozen=True)
class Tag:
    name: str
    closing: bool
    place: Place


@dataclass(frozen=True)
class Block:
    """A part of the grammar. Without `closing`, the turn ended inside it."""

    opening: Tag
    closing: Tag | None
    body: str


@dataclass(frozen=True)
class ParsedTurn:
    """A turn, and its properties that rewards use."""

    number: int
    text: str
    tags: tuple[Tag, ...]
    blocks: tuple[Block, ...]  # the parse
    fault: int | None  # the first character that the grammar rejects; None: the turn is valid

    @property
    def think(self) -> Block | None:
        return self.blocks[0] if self.blocks and self.blocks[0].closing is not None else None

    @property
    def last(self) -> Block | None:
        """The last block, if the turn is valid; it may be unclosed."""
        return self.blocks[-1] if self.fault is None and self.blocks else None

    @property
    def answer(self) -> Block | None:
        """A non-empty answer at the end of a valid turn; it may be unclosed."""
        last = self.last
        return last if last is not None and last.opening.name == "answer" and last.body.strip() else None

    @property
    def kind(self) -> str:
        """The kind of a complete turn, "tool_call" or "answer"; "" for an incomplete turn."""
        last = self.last
        return last.opening.name if last is not None and last.closing and last.opening.name != "think" else ""

    @property
    def unclosed(self) -> tuple[Tag, ...]:
        """The unclosed `<think>` tags. Choice: a tag is unclosed if the next think tag is not `</think>`."""
        thinks = [tag for tag in self.tags if tag.name == "think"]
        return tuple(
            tag
            for tag, following in zip_longest(thinks, thinks[1:])
            if not tag.closing and (following is None or not following.closing)
        )

    @property
    def balanced(self) -> bool:
        """Whether the tags balance. Choice: all tags are paired, and no pair is nested."""
        openings, closings = self.tags[::2], self.tags[1::2]
        return len(openings) == len(closings) and all(
            not opening.closing and closing.closing and opening.name == closing.name
            for opening, closing in zip(openings, closings, strict=True)
        )

    @property
    def full(self) -> Place:
        return self.place_at(0, len(self.text))

    @property
    def end(self) -> Place:
        """The token that ended the turn."""
        return self.place_at(len(self.text), len(self.text))

    @property
    def fault_place(self) -> Place:
        """The first fault, or the end of the turn."""
        return self.end if self.fault is None else self.place_at(self.fault, self.fault + 1)

    def place_at(self, start: int, end: int) -> Place:
        return Place(self.number, start, end)

    def place_of(self, block: Block) -> Place:
        end = len(self.text) if block.closing is None else block.closing.place.end
        return self.place_at(block.opening.place.start, end)

    def first_of(self, tag: Tag) -> Place:
        """The first character of a tag, because only the token that starts a wrong tag is at fault."""
        return self.place_at(tag.place.start, tag.place.start + 1)

    def missing_closing_place(self, opening: Tag) -> Place:
        """The place where a closing tag is missing: at the next tag, or at the end of the turn."""
        number = bisect_right(self.tags, opening.place, key=lambda tag: tag.place)
        return self.first_of(self.tags[number]) if number < len(self.tags) else self.end


def parse_episode(turns: Sequence[str]) -> list[ParsedTurn]:
    if isinstance(turns, str):
        raise ValueError("turns is one string, expected a list with the text of every turn")
    return [parse_turn(number, text) for number, text in enumerate(turns)]


def parse_turn(number: int, text: str) -> ParsedTurn:
    tags = tuple(Tag(match[2], match[1] == "/", Place(number, *match.span())) for match in TAG.finditer(text))
    blocks: list[Block] = []
    reached, fault = 0, None  # characters
    for opening, closing in zip_longest(tags[::2], tags[1::2]):
        fault = _first_fault(text, reached, opening, closing, FOLLOWS[blocks[-1].opening.name if blocks else ""])
        if fault is not None:
            break
        begin, end = opening.place.end, len(text) if closing is None else closing.place.start
        blocks.append(Block(opening, closing, text[begin:end]))
        reached = len(text) if closing is None else closing.place.end
    return ParsedTurn(
        number, text, tags, tuple(blocks), _first_word(text, reached, len(text)) if fault is None else fault
    )


def _first_fault(text: str, reached: int, opening: Tag, closing: Tag | None, allowed: Sequence[str]) -> int | None:
    word = _first_word(text, reached, opening.place.start)
    if word is not None:
        return word
    if opening.closing or opening.name not in allowed:
        return opening.place.start
    if closing is not None and not (closing.closing and closing.name == opening.name):
        return closing.place.start
    return None


def _first_word(text: str, start: int, end: int) -> int | None:
    """The first non-space character between `start` and `end`; None if there is none."""
    stripped = text[start:end].lstrip()
    return end - len(stripped) if stripped else None


def parseable(turns: Sequence[ParsedTurn]) -> bool:
    return [turn.kind for turn in turns] == ["tool_call"] * (len(turns) - 1) + ["answer"]


def substantive(thinking: Block) -> bool:
    """Whether a thinking block has at least MIN_THINK_CHARS characters of words.

    DIFFERS from the release, which counts every character: only words count, with one space between two words, and at
    least one letter is required. Ten dots are not thinking.
    """
    num_chars, has_letter = -1, False
    for word in WORD.finditer(thinking.body):
        num_chars += 1 + len(word[0])
        has_letter = has_letter or any(map(str.isalpha, word[0]))
        if num_chars >= MIN_THINK_CHARS and has_letter:
            return True
    return False
