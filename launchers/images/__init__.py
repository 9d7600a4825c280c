"""Images with captions: reading and checks, aspect ratio buckets, and preparation for training."""
