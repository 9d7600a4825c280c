"""torchtune behind :class:`launchers.engines.Engine`: its own recipes, extended by a subclass."""
