"""Makes untrusted text, from a model, a dataset or a server, safe to print on a terminal.

Escape sequences can set a terminal's title and clipboard, clear it, or overwrite earlier output. Direction overrides
display text in another order.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Replaces control characters and direction overrides by visible signs, except newlines and tabs."""
    return UNSEEN.sub(lambda match: _sign(ord(match[0])), text)


def _sign(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures of Unicode
    return f"⟨U+{code:04X}⟩"


def say(message: str) -> None:
    """Prints a line to stderr, above a progress bar if there is one."""
    from tqdm import tqdm  # imported late, so that commands that print nothing do not wait for it

    tqdm.write(visible(message), file=sys.stderr)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Formats a text table: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table. A cell, for example a label from a dataset, cannot end its cell or row."""
    head, *lines = [f"| {' | '.join(map(_escaped_cell, cells))} |" for cells in (columns, *rows)]
    return "\n".join([head, "|---" * len(columns) + "|", *lines])


def _escaped_cell(text: str) -> str:
    return " ".join(text.splitlines()).replace("|", "\\|")


def open_closed_streams() -> None:
    """Opens closed standard streams as /dev/null, because the next opened file would get their number and output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))


def guard_stdout() -> None:
    """Applies `visible` to all further output if stdout is a terminal; a pipe gets it unchanged.

    Text that stdout's encoding lacks is printed as escapes instead of raising.
    """
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdout.isatty():
        os.environ.setdefault("NO_COLOR", "1")  # Python 3.14's argparse would write escape sequences
        write = sys.stdout.write
        sys.stdout.write = lambda text, /: write(visible(text))  # type: ignore[missing-attribute]
