"""Telemetry of the ranks, the run's state computed from it, and its presentation."""
