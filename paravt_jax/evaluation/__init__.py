"""Samples played so many at a time, a line for each as it ends, and a certificate for what they add up to."""
