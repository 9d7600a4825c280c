"""Benchmarks whose results are committed under results/, each with the command that makes it."""
