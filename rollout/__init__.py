"""Engines, episodes, tools and video. This package never imports jax, so it works with any learner."""

import sys

# python -m imports the package before the command, whose imports take long
if sys.argv[:1] == ["-m"] and f"{__name__}.serve" in sys.orig_argv:
    from rollout.cli import exit_on_interrupt

    exit_on_interrupt()
