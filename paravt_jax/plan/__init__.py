"""Memory and step-time estimates before you rent anything."""
