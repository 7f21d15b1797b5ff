"""Sampling with a paged key/value cache and continuous batching, in at most five compiled programs.

requests.py     a request and its completion
pages.py        who uses which page of the cache, and the prompts' beginnings that pages hold
frames.py       where the encoded frames are
paged.py        attention over pages
programs.py     the compiled programs: encode frames, prefill, copy a page, decode
sampler.py      fills rows, decodes, and returns completions
"""

from model_port.sampler.requests import Completion, SamplerPrompt, SamplerRequest, SamplingParams
from model_port.sampler.sampler import Sampler

__all__ = ["Completion", "Sampler", "SamplerPrompt", "SamplerRequest", "SamplingParams"]
