"""Freed memory is used again."""

import subprocess
import sys
from pathlib import Path

import pytest

from model_port import malloc

# In a process of its own, whose malloc is still as the system has it.
PAGES_OF_A_SECOND_BLOCK = f"""
import resource, runpy, sys
if sys.argv[1] == "kept":
    runpy.run_path({str(Path(malloc.__file__))!r})["keep_freed_memory"]()
bytearray(b"x") * 2**26
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(b"x") * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_block_needs_new_pages_only_without_kept_memory():
    without, kept = [
        int(
            subprocess.run(
                [sys.executable, "-c", PAGES_OF_A_SECOND_BLOCK, mode], check=True, capture_output=True
            ).stdout
        )
        for mode in ("", "kept")
    ]
    assert kept < 100 < without  # the block has 16,384 pages of 4 KiB
