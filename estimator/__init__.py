"""Predicts memory, speed and price of a fine-tuning job, and plans where to run it.

Imports neither torch nor Metaflow.
"""

METAFLOW_PACKAGE_POLICY = "include"  # a remote task gets this package whole, tables included
