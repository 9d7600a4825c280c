"""Scores for answers of a model, by a function of the user's or by a reward model."""
