"""CPU shim for running the CUDA wheels of torchvision and sglang on a CPU-only torch.

Put this folder on PYTHONPATH, so that child processes load it too.
"""

import importlib.abc
import multiprocessing
import pkgutil
import sys


class _Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and name not in _done:
            # torchvision from PyPI is a CUDA build: its _C.so cannot be dlopen'ed beside the
            # CPU torch (libc10_cuda.so, libtorch_cuda.so missing), so torchvision::nms and
            # ::qnms are never defined, and torchvision/_meta_registrations.py dies at import
            # ("operator torchvision::nms does not exist").  Declare both (no implementation).
            _done.add(name)
            import torch

            lib = torch.library.Library("torchvision", "FRAGMENT")
            for op in ("nms", "qnms"):
                lib.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _keep.append(lib)
        elif name == "sglang" and name not in _done:
            # declares torch.ops.sgl_kernel.* names that sglang reads at import time
            _done.add(name)
            import sgl_kernel  # noqa: F401
            import torch

            # SGLang pins its cache of routed experts with cudart; result 0 means success.
            torch.cuda.cudart = lambda: _Pinned
        return None


class _Pinned:
    cudaError = type("cudaError", (), {"success": 0})

    @staticmethod
    def cudaHostRegister(*_):
        return 0

    @staticmethod
    def cudaHostUnregister(*_):
        return 0


_done, _keep = set(), []
sys.meta_path.insert(0, _Hook())


def _fork_children():
    """Forks child processes. SGLang spawns them, because of CUDA, and each would import torch and sglang, for 13 s."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force)


def _import_only_qwen():
    """Hides all models but Qwen's, because SGLang would import about 200 model files to find the one to serve."""
    registries = ("sglang.srt.models.", "sglang.srt.multimodal.processors.")
    iter_modules = pkgutil.iter_modules

    def qwen_modules(path=None, prefix=""):
        return (m for m in iter_modules(path, prefix) if prefix not in registries or "qwen" in m.name)

    pkgutil.iter_modules = qwen_modules


_fork_children()
_import_only_qwen()
