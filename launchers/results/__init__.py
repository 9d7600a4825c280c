"""The finished model's folder: export, model card, GGUF conversion command, upload to the Hub."""
