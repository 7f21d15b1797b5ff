"""Seeds by name: what is drawn follows from what it is for, in whatever order it is asked."""

import hashlib


def derived_seed(*parts: object) -> int:
    """A seed of its own for everything that can be named, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())
