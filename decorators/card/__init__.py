"""Live card of a profiled step: predicted next to measured."""
