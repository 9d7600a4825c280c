"""Kubernetes: what a plan asks for, whether the cluster could ever run it, and the wait for it."""
