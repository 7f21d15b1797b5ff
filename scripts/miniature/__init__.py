"""The paper's experiment at laptop size: a small world, a cold start, and the arms of table B."""
