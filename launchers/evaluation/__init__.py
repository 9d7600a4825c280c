"""Held-out loss, answers and images of a model before and after training."""
