"""Lazy imports of torch and transformers, which take longer to import than everything else.

Every test process imports all test files, but only the process that runs the conftest's TORCH_FILES needs these two.
"""

import importlib
from typing import Any


class OnUse:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)  # pytest probes every object of a test module for private attributes
        return getattr(importlib.import_module(self._name), attribute)


torch, transformers = OnUse("torch"), OnUse("transformers")
pil_processing = OnUse("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
