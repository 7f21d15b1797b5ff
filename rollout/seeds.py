"""Random seeds derived from names, so that they do not depend on the order of their use."""

import hashlib


def derived_seed(*parts: object) -> int:
    """Derives a seed from the parts of a name. It is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())
