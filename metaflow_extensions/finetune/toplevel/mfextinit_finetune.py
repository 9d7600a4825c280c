"""Extension point of Metaflow: names the module whose names are added to ``metaflow``."""

toplevel = "toplevel"
