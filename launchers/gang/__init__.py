"""Gang of training processes over all nodes of a run, which start and end together."""
