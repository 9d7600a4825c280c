"""A run from its settings to the model: what Metaflow's steps and jobs of a scheduler have in common."""
