"""From rows of text to tokens on disk: sources, validation, rendering and masking, packing, order."""
