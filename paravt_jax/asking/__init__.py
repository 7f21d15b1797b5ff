"""A policy that is asked: opened from its name or at its servers, and what comes of a question."""
