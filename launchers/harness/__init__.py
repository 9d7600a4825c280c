"""Task metrics of base and finished model by lm-evaluation-harness: task selection, runs and scores.

The harness is an optional dependency (extra ``eval``), imported only in the process that runs it.
"""
