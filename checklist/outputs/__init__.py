"""Outputs of a result besides result.json: chat, metrics, and taints or labels of Kubernetes nodes.

A failing output never loses the result; it reports the failure in one line.
"""
