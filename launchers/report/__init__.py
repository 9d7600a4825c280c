"""Telemetry of the ranks, the state of the run computed from it, and the output of both."""
