"""Task metrics of base and result, by lm-evaluation-harness: which tasks there are, and their scores.

It is an extra (``eval``), imported only in the process that runs it.
"""
