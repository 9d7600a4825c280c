"""What each engine supports, and the training step (Setup) that it makes of a job in a layout."""
