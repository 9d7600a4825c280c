"""NCCL or Gloo collectives and point-to-point transfers: speed, hangs, corrupted data."""
