"""The pages of the key/value cache: who uses them, and which beginnings of prompts they hold.

A page holds the keys and values of PAGE_TOKENS tokens that follow each other. Pages of prefilled tokens have a digest
of everything from the prompt's start to the page's end, so that another prompt with the same beginning uses them too.
They stay when nobody uses them any more, until their room is needed. Page 0 is for writes that nobody reads.
"""

from collections import OrderedDict
from collections.abc import Sequence

PAGE_TOKENS = 64


class PagePool:
    """A page is free, idle (labelled, without users) or used by requests."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._users = [0] * num_pages
        self._pages: dict[bytes, int] = {}  # by digest
        self._digests: dict[int, bytes] = {}  # by page
        self._idle: OrderedDict[int, None] = OrderedDict()  # with a digest and without users, oldest first

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning that the pool holds."""
        pages = []
        for digest in digests:
            if (page := self._pages.get(digest)) is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a user to pages that have a digest."""
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)

    def take(self, count: int) -> list[int]:
        """Pages with one user and without a digest: free ones first, then those that are idle for the longest time."""
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._pages[self._digests.pop(page)]
            self._users[page] = 1
            pages.append(page)
        return pages

    def label(self, page: int, digest: bytes) -> None:
        """Offers a page to later prompts; does nothing if another page already has this digest."""
        if digest not in self._pages:
            self._pages[digest] = page
            self._digests[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Removes a user. Later pages of a prompt become idle first, because they are of no use without the earlier."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._digests:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Drops all digests: what pages hold is not what new weights would compute."""
        self._free += self._idle
        for held in (self._idle, self._pages, self._digests):
            held.clear()
