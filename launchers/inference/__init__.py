"""Inference with finished models: find, check against memory, load, chat."""
