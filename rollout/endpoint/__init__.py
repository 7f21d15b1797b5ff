"""Models behind OpenAI-compatible endpoints: a client, dialogues as messages, and servers that this machine starts."""
