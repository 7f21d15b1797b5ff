"""Shows whether everything works on this machine at a model's size: stages, each in a separate process."""
