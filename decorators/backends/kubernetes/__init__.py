"""Kubernetes backend: resource requests, preflight, waiting, and disruptions."""
