"""Allocates the device's table of frame features, so that frames that are needed again are not encoded again."""

from collections.abc import Mapping, Sequence

from model_port.inputs import Frame

TABLE_TOKENS = 8192


class FrameTable:
    """The frames in the table. It is a ring buffer: at its end, new frames overwrite the oldest from the start."""

    def __init__(self, num_tokens: int = TABLE_TOKENS):
        self.num_tokens = num_tokens
        self._rows: dict[bytes, range] = {}  # by digest
        self._next = 0

    def __getitem__(self, frame: Frame) -> int:
        """Returns the frame's first row in the table."""
        return self._rows[frame.digest].start

    def place(self, frames: Sequence[tuple[Frame, int]]) -> list[Frame]:
        """Allocates rows for pairs of a frame and its number of tokens. Returns the frames that must be encoded."""
        wanted = {frame.digest: (frame, size) for frame, size in frames}
        missing = self._add(wanted)
        if wanted.keys() - self._rows.keys():  # a new frame took the rows of a wanted one
            self.forget()
            missing = self._add(wanted)
        return missing

    def forget(self) -> None:
        self._rows.clear()
        self._next = 0

    def _add(self, wanted: Mapping[bytes, tuple[Frame, int]]) -> list[Frame]:
        """Allocates rows for frames that are not in the table, and returns these frames."""
        missing = [digest for digest in wanted if digest not in self._rows]
        for digest in missing:
            size = wanted[digest][1]
            start = self._next if self._next + size <= self.num_tokens else 0
            self._next = start + size
            for other, rows in list(self._rows.items()):
                if rows.start < self._next and start < rows.stop:
                    del self._rows[other]
            self._rows[digest] = range(start, self._next)
        return [wanted[digest][0] for digest in missing]
