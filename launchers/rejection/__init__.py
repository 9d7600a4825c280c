"""Rejection sampling: sample several answers per prompt, score them, and train on the best.

Generation and scoring run in separate processes that write shards of rows; an existing shard is not computed
again.
"""
