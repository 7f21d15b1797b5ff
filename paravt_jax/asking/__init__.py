"""Answers questions with a policy: opens the model or connects to its servers, and serves or prints the answers."""
