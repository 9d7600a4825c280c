"""One folder per subject: probes measure it on the nodes, judges turn measurements into findings."""
