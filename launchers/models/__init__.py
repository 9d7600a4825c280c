"""Model folders: download, conversion and verification of weights; generated tiny models."""
