"""The card of a profiled step: predicted beside measured, live while the step runs."""
