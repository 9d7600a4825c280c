"""Preparation of text data: sources, validation, rendering and masking, packing, order, tokens on disk."""
