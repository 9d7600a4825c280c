"""Evaluation of a model before and after training: held-out loss, answers and images."""
