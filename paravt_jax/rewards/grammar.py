"""One turn of the assistant as the grammar reads it: its tags, the part of it that is well-formed, the first fault.

    turn      := <think> text </think> ( tool_call+ | <answer> text </answer> )
    tool_call := <tool_call> text </tool_call>

with white space between the parts. A text has no tags in it, those of `<tool_response>` and `<tool_code>` included: the
first is the environment's to write; the second, though the dispatcher carries such calls out, is a leak of the base
model's prior and not in the trained grammar.

The parse is the longest part of the turn, from its first character, that the grammar contains. The first fault is a tag
out of place, doubled or nested, or text outside the parts. Every turn but the last must be a tool turn, the last an
answer turn.

What the text of the specification leaves open is decided at the lines marked `Choice:`.
"""

import re
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
    """Characters of one turn, from `start` up to and without `end`; none, at its end, is the token that ended it."""

    turn: int
    start: int
    end: int

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.end


@dataclass(frozen=True)
class Tag:
    """An opening or closing, wherever it stands."""

    name: str
    closing: bool
    place: Place


@dataclass(frozen=True)
class Block:
    """A part of the grammar. Without `closing`, the turn was cut off in it."""

    opening: Tag
    closing: Tag | None
    body: str


@dataclass(frozen=True)
class ParsedTurn:
    """A turn, and every property of it that a reward asks for."""

    number: int
    text: str
    tags: tuple[Tag, ...]
    blocks: tuple[Block, ...]  # the parse
    fault: int | None  # the first character that the grammar does not allow; None: all of the turn is in the parse

    @property
    def think(self) -> Block | None:
        return self.blocks[0] if self.blocks and self.blocks[0].closing is not None else None

    @property
    def calls(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.opening.name == "tool_call" and block.closing is not None)

    @property
    def last(self) -> Block | None:
        """The block that the turn ends with; it may be cut off."""
        return self.blocks[-1] if self.fault is None and self.blocks else None

    @property
    def answer(self) -> Block | None:
        """The answer, if it says something and is where the turn ends; it may be cut off."""
        last = self.last
        return last if last is not None and last.opening.name == "answer" and last.body.strip() else None

    @property
    def kind(self) -> str:
        """What this is in the grammar: "tool_call" or "answer", or "" where it is not, or not yet, a turn."""
        last = self.last
        return last.opening.name if last is not None and last.closing and last.opening.name != "think" else ""

    @property
    def unclosed(self) -> tuple[Tag, ...]:
        """Choice: a `<think>` is never closed if the next tag of its kind is not its closing; a doubled one so too."""
        thinks = [tag for tag in self.tags if tag.name == "think"]
        return tuple(
            tag
            for tag, following in zip_longest(thinks, thinks[1:])
            if not tag.closing and (following is None or not following.closing)
        )

    @property
    def balanced(self) -> bool:
        """Choice: all tags come in pairs and no pair is inside another."""
        openings, closings = self.tags[::2], self.tags[1::2]
        return len(openings) == len(closings) and all(
            not opening.closing and closing.closing and opening.name == closing.name
            for opening, closing in zip(openings, closings, strict=True)
        )

    @property
    def whole(self) -> Place:
        return self.place(0, len(self.text))

    @property
    def end(self) -> Place:
        """The token that ended the turn."""
        return self.place(len(self.text), len(self.text))

    @property
    def fault_place(self) -> Place:
        """What stands where the grammar wanted something else: the first fault, or the end of the turn."""
        return self.end if self.fault is None else self.place(self.fault, self.fault + 1)

    def place(self, start: int, end: int) -> Place:
        return Place(self.number, start, end)

    def place_of(self, block: Block) -> Place:
        end = len(self.text) if block.closing is None else block.closing.place.end
        return self.place(block.opening.place.start, end)

    def first_of(self, tag: Tag) -> Place:
        """The first character of a tag: the token that begins a wrong one is wrong, the others follow from it."""
        return self.place(tag.place.start, tag.place.start + 1)

    def in_place_of_closing(self, opening: Tag) -> Place:
        """What came where the closing of a tag should have stood: the next tag, or the end of the turn."""
        following = next((tag for tag in self.tags if tag.place.start >= opening.place.end), None)
        return self.end if following is None else self.first_of(following)


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
    """The first character between the two that is not white space."""
    rest = text[start:end].lstrip()
    return end - len(rest) if rest else None


def parseable(turns: Sequence[ParsedTurn]) -> bool:
    return [turn.kind for turn in turns] == ["tool_call"] * (len(turns) - 1) + ["answer"]


def substantive(thinking: Block) -> bool:
    """Whether a thinking block says something: ten dots do not.

    DIFFERS from the release, which counts every character: here words count, and one space between two of them. There
    must be a letter in them.
    """
    num_chars, has_letter = -1, False
    for word in WORD.finditer(thinking.body):
        num_chars += 1 + len(word[0])
        has_letter = has_letter or any(map(str.isalpha, word[0]))
        if num_chars >= MIN_THINK_CHARS and has_letter:
            return True
    return False
