"""Measurement of a step: sampling of its processes and GPUs, and records for later estimates."""
