"""The order of a frame's patches: processors return them in blocks of merge x merge patches."""

from functools import lru_cache

import numpy as np
from jaxtyping import Int


@lru_cache(maxsize=256)  # videos have few sizes and many frames
def patch_positions(grid: tuple[int, int], merge: int) -> Int[np.ndarray, "P 2"]:
    """Returns the row and column of each patch in merge order: block by block of merge x merge patches."""
    down, across = grid
    cells = np.stack(np.meshgrid(np.arange(down), np.arange(across), indexing="ij"), axis=-1)
    blocks = cells.reshape(down // merge, merge, across // merge, merge, 2).transpose(0, 2, 1, 3, 4)
    return blocks.reshape(-1, 2).astype(np.int32)
