"""Scoring of a model's answers by a user's function or a reward model."""
