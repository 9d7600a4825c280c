"""Stages of a run, shared by the Metaflow flow and scheduler jobs."""
