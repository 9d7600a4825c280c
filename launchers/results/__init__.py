"""Folder of the finished model: export, model card, GGUF conversion command, upload to the Hub."""
