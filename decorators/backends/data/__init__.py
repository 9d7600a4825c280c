"""Facts about clusters as tables, each row with its source."""
