"""Named random seeds, independent of the order in which they are used."""

import hashlib


def derived_seed(*parts: object) -> int:
    """A seed derived from a name; equal in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())
