"""The released evaluation's protocol (eval.protocol=release): texts, frames, dialogue and scores as in its driver.

Its texts are imported from your copy of the release and are not in this package. docs/evaluation.md has the differences
from this project's own protocol.
"""
