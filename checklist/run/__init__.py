"""Execution of a run: a supervisor per node, worker processes that may hang, coordinator on rank 0."""
