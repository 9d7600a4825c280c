"""What a step really uses: sampling of its processes and GPUs, and what later estimates learn from it."""
