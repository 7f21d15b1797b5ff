"""Frames of videos: decoded in worker processes, resized once, kept in a bounded store."""
