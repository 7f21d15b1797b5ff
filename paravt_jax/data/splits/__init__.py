"""The public evaluation splits, one file each; `data.split` names one."""

from paravt_jax.data.splits import charades, longvideobench, lvbench, mlvu, mmvu, videomme
from paravt_jax.data.splits.public import PublicSplit, Sample

__all__ = ["SPLITS", "PublicSplit", "Sample", "split_named"]

SPLITS: dict[str, PublicSplit] = {
    split.name: split
    for split in (
        videomme.WITHOUT_SUBTITLES,
        videomme.WITH_SUBTITLES,
        longvideobench.VALIDATION,
        lvbench.ALL,
        mlvu.DEV,
        mmvu.VALIDATION,
        charades.TEST,
    )
}


def split_named(name: str) -> PublicSplit:
    if name not in SPLITS:
        raise ValueError(f"data.split={name} is unknown, expected {', '.join(SPLITS)}")
    return SPLITS[name]
