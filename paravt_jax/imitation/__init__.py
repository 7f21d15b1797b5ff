"""The SFT cold start: imitation of traces."""
