"""Execution of a run: a node agent per node, worker processes that may hang, coordinator on rank 0."""
