"""Tables of facts about what takes a finished model."""
