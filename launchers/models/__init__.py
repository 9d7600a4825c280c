"""Model folders: where weights come from, whether they are whole, and the tiny model made on the spot."""
