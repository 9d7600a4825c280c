"""What a gang and the checklist share: the allocation they run in, the channel, and processes that end."""
