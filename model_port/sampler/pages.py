"""Allocates the pages of the key/value cache, and finds pages that hold the prefix of a prompt.

A page holds the keys and values of PAGE_TOKENS consecutive tokens. A page of prefilled tokens has a digest of
everything from the prompt's start to the page's end, so that other prompts with the same prefix can share it. Such a
page stays in the cache after its last request has ended, until its space is needed. Page 0 takes writes that nobody
reads.
"""

from collections import OrderedDict
from collections.abc import Sequence

PAGE_TOKENS = 64


class PagePool:
    """The pages of a cache. Each page is free, idle (with a digest, but without users) or used by requests."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._users = [0] * num_pages  # number of requests that use each page
        self._pages: dict[bytes, int] = {}  # by digest
        self._digests: dict[int, bytes] = {}  # by page
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """The number of pages that `take` can return."""
        return len(self._free) + len(self._idle)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest cached prefix, for a prompt with these page digests."""
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
        """Allocates pages with one user and without a digest: free pages first, then the least recently used."""
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
        """Lets later prompts share a page. Does nothing if another page already has this digest."""
        if digest not in self._pages:
            self._pages[digest] = page
            self._digests[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Removes a user from pages. A prompt's later pages become idle first, because they need the earlier pages."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._digests:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Drops all digests, because the cached keys and values are not valid for new weights."""
        self._free += self._idle
        for held in (self._idle, self._pages, self._digests):
            held.clear()
