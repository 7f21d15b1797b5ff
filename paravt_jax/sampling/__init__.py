"""Weights into samples: the embedded engine, what engines are given, how frames reach them."""
