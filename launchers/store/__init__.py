"""A folder as one unit in a store, and checkpoints made of such units."""
