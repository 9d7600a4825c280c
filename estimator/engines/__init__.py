"""Limits of each engine, and its training step (Setup) for a job in a layout."""
