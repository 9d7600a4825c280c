"""Tells Metaflow which module beside this one has the names that ``metaflow`` gets."""

toplevel = "toplevel"
