"""Charades-STA, test: find when a sentence holds in a video of half a minute. Times are rounded to 0.1 s.

The hub's file stores times in half precision, for example 24.296875 for 24.3. Rows have no ids, and some are equal;
all count. DIFFERS from lmms-eval, which keys replies by video, sentence and window, so that equal rows merge.
"""

from collections.abc import Mapping
from typing import Any

from paravt_jax.data.splits.public import PublicSplit, Sample, grounding
from paravt_jax.rewards.official import window_iou


def sample(row: Mapping[str, Any]) -> Sample:
    window_s = [round(float(time_s), 1) for time_s in row["timestamp"]]
    name = f"{row['video']}:{row['caption']}:{window_s}"
    return grounding(name, row["caption"], window_s, f"Charades_v1_480/{row['video']}")


TEST = PublicSplit(
    name="charades",
    title="Charades-STA",
    repo="lmms-lab/charades_sta",
    rows="data/test-*.parquet",
    columns={"video": str, "caption": str, "timestamp": list[float]},
    sample=sample,
    num_samples=3720,
    official=window_iou,
    thresholds=(0.3, 0.5, 0.7),
)
