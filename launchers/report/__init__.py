"""What ranks say while they train, and what terminal, trackers and cards make of it."""
