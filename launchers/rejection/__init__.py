"""Rejection sampling: several answers of a model to each prompt, a score for each, and the best to train on.

Generation and scoring are processes of their own that write shard after shard of rows; a shard that is there
is never made again.
"""
