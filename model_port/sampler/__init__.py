"""Samples with a paged key/value cache and continuous batching, in a few compiled programs.

requests.py     requests and completions
pages.py        allocates the cache's pages, and finds cached prompt prefixes
frames.py       allocates the table of encoded frames
paged.py        attention over pages
gpu.py          the kernel for it on NVIDIA GPUs
programs.py     the compiled programs: encode frames, prefill, copy a page, decode
sampler.py      fills rows, decodes, and returns completions
check.py        checks the kernel for pages
"""

from model_port.sampler.requests import Completion, SamplerPrompt, SamplerRequest, SamplingParams
from model_port.sampler.sampler import Sampler

__all__ = ["Completion", "Sampler", "SamplerPrompt", "SamplerRequest", "SamplingParams"]
