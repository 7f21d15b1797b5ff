"""One step of imitation after another: the cold start from traces."""
