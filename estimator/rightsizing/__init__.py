"""Right-sizing: the next resource request of a step, from what its earlier tasks used."""
