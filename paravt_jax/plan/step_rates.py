"""The numbers that a step's seconds depend on, at their best and at their worst.

docs/training.md, section "Seconds per step", lists the source of each number.
"""

from typing import NamedTuple


class StepRates(NamedTuple):
    calls: float  # per episode
    turns: int  # requests per main agent; each sends all pictures again
    tail: float  # the longest dialogue over the mean
    matmul_frac: float  # fraction of peak FLOPs, in prefill and the vision tower
    memory_frac: float  # fraction of memory bandwidth, in decoding
    weight_passes: float  # times the embedded sampler moves the weights per token
    hop_s: float  # latency of an all-reduce over mesh.tensor
    overview_s: float  # CPU core seconds to decode the frames of an overview
    picture_s: float  # server CPU seconds per picture in a request
    publish_bytes_per_s: float  # from the learner into all servers
    update: float  # an update's time relative to its roofline
    overlaps: bool  # parts that run on different hardware overlap


LOW = StepRates(1.0, 2, 1.0, 0.55, 0.8, 1.0, 5e-6, 5.0, 0.008, 3e9, 1.0, overlaps=True)
HIGH = StepRates(2.5, 3, 2.0, 0.18, 0.5, 3.5, 2e-5, 15.6, 0.030, 1e9, 2.0, overlaps=False)
