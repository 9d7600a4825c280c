"""Published measurements: tables, conversion of rows to setups, fit of the memory ranges, and scores."""
