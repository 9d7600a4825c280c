"""torchtune behind :class:`launchers.engines.Engine`: its own recipes, entered through a subclass."""
