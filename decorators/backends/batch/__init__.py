"""AWS Batch: what a plan asks for, whether it can be had, the wait, and what Metaflow needs worked around."""
