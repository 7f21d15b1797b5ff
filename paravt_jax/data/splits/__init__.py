"""The public evaluation splits. `data.split` names one of them, or a split in your own file."""

from paravt_jax.data.splits.public import PublicSplit, Sample
from paravt_jax.data.splits.shipped import SPLITS
from rollout.user_code import is_location, load_object

__all__ = ["SPLITS", "PublicSplit", "Sample", "split_named"]


def split_named(name: str) -> PublicSplit:
    """Returns the shipped split of this name, or loads the split at path/to/file.py:NAME."""
    if is_location(name):
        split = load_object("data.split", name)
        if not isinstance(split, PublicSplit):
            raise ValueError(f"data.split={name} is not a PublicSplit; docs/extend.md has an example")
        return split
    if name not in SPLITS:
        raise ValueError(f"data.split={name} is unknown, expected {', '.join(SPLITS)} or path/to/file.py:NAME")
    return SPLITS[name]
