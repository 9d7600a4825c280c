"""Shared parts of the probes: context of a probe process, and its progress reports."""
