"""Reads video frames: worker processes decode them, each is resized once, and bounded stores cache them."""
