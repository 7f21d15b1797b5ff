"""torch and transformers, imported when a test first uses them: they take longer to import than everything else.

Every test process imports all test files, and only the process that runs the conftest's TORCH_FILES needs the two.
"""

import importlib
from typing import Any


class OnUse:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)  # pytest looks for private ones in every object of a test module
        return getattr(importlib.import_module(self._name), attribute)


torch, transformers = OnUse("torch"), OnUse("transformers")
pil_processing = OnUse("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
