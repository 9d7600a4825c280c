"""``finetune doctor``: what works on this machine, and how to fix the rest.

Each probe is a function that returns lines, and runs in a separate process with a time limit in seconds
(:mod:`flows.doctor.processes`), so that its imports and crashes affect no other probe. To add one: a function
in one of the modules here, and its row in :mod:`flows.doctor.probes`.
"""
