"""Prices of instance types: refreshed from clouds, cached, shipped."""
