"""DeepSpeed behind :class:`launchers.engines.Engine`: our loop over a transformers model."""
