"""Shared parts of the judges: context of a run, thresholds, comparison with peers, advice, coverage."""
