"""Measuring: one supervisor for each node, worker processes that may hang, and rank 0 that conducts them."""
