"""Freed memory is reused."""

import subprocess
import sys
from pathlib import Path

import pytest

from model_port import malloc

# Runs in a separate process with the system's default malloc settings.
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
def test_freed_memory_is_reused_if_kept():
    commands = ([sys.executable, "-c", PAGES_OF_A_SECOND_BLOCK, mode] for mode in ("", "kept"))
    without, kept = (int(subprocess.run(command, check=True, capture_output=True).stdout) for command in commands)
    assert kept < 100 < without  # the block has 16,384 pages of 4 KiB
