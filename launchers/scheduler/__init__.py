"""Runs on a scheduler's nodes, without Metaflow: ``python -m launchers``."""
