"""What all probes share: the context of a probe process and its progress reports."""
