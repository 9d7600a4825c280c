"""Model folders: fetching and verification of weights, and generated tiny models."""
