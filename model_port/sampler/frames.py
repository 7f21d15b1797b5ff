"""Where the features of frames are in the table on the device. Frames that are needed again are not encoded again."""

from collections.abc import Sequence

from model_port.inputs import Frame

TABLE_TOKENS = 8192


class FrameTable:
    """Fills the table from start to end, and then again from the start, over the oldest frames."""

    def __init__(self, num_tokens: int = TABLE_TOKENS):
        self.num_tokens = num_tokens
        self._starts: dict[bytes, int] = {}  # by digest
        self._sizes: dict[bytes, int] = {}
        self._next = 0

    def __getitem__(self, frame: Frame) -> int:
        """The frame's first row."""
        return self._starts[frame.digest]

    def place(self, frames: Sequence[tuple[Frame, int]]) -> list[Frame]:
        """Makes room for frames, given with their numbers of tokens, and returns those that must be encoded."""
        wanted = {frame.digest: (frame, size) for frame, size in frames}
        missing = [digest for digest in wanted if digest not in self._starts]
        for digest in missing:
            self._add(digest, wanted[digest][1])
        if any(digest not in self._starts for digest in wanted):  # one of them was written over
            self.forget()
            missing = list(wanted)
            for digest in missing:
                self._add(digest, wanted[digest][1])
        return [wanted[digest][0] for digest in missing]

    def forget(self) -> None:
        self._starts.clear()
        self._sizes.clear()
        self._next = 0

    def _add(self, digest: bytes, size: int) -> None:
        start = self._next if self._next + size <= self.num_tokens else 0
        end = start + size
        for other, at in list(self._starts.items()):
            if at < end and start < at + self._sizes[other]:
                del self._starts[other], self._sizes[other]
        self._starts[digest], self._sizes[digest], self._next = start, size, end
