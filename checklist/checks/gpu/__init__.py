"""GPUs: presence, links, errors, load, DCGM diagnostics."""
