"""Images with captions: read and checked, in buckets of one aspect ratio, laid out for training."""
