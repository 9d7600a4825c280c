"""Probes that run in a rank's own process (:mod:`checklist.probes.worker`), which may hang or be killed."""
