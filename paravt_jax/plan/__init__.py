"""Estimates a run's memory and step time before you rent anything."""
