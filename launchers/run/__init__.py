"""Stages of a run that Metaflow's steps and jobs of a scheduler share."""
