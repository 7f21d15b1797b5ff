"""What others wrote, a model, a data set, a server, in signs that a terminal shows and does not obey.

Escape sequences set a terminal's title and clipboard, clear it, or move what is written next over what stands there;
overrides of direction show a text in another order than it has.
"""

import os
import re
import sys

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """What has no glyph of its own, or would turn the text around it, as a sign that has one. Lines and tabs stay."""
    return UNSEEN.sub(lambda match: _sign(ord(match[0])), text)


def _sign(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures of Unicode
    return f"⟨U+{code:04X}⟩"


def say(message: str) -> None:
    """A line on stderr, for whoever reads along."""
    print(visible(message), file=sys.stderr, flush=True)


def guard_stdout() -> None:
    """All that is printed from here on is made visible where stdout is a terminal; a pipe gets it as it is."""
    if sys.stdout.isatty():
        os.environ.setdefault("NO_COLOR", "1")  # argparse of Python 3.14 would write escape sequences
        write = sys.stdout.write
        sys.stdout.write = lambda text, /: write(visible(text))
