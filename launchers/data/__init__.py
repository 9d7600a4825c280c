"""Data tables on software that uses a finished model."""
