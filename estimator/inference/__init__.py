"""Requests of the steps of rejection sampling, and memory of a server for a model."""
