"""What all judges share: context of a run, thresholds, comparison with peers, advice, coverage."""
