"""One gang of processes over all nodes of a run: it trains together and ends together."""
