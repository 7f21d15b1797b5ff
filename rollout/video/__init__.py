"""Video frames: decoded in worker processes, resized once, kept in a bounded store."""
