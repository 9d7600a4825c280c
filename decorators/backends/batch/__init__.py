"""AWS Batch backend: resource requests, preflight, waiting, and workarounds for Metaflow."""
