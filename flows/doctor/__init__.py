"""``finetune doctor``: what would work on this machine, and what mends the rest.

Each probe is a function that returns lines, and runs in a process of its own with a limit in seconds
(:mod:`flows.doctor.processes`): what it imports, asks or breaks stays there. To add one: a function
in one of the modules here, and its row in :mod:`flows.doctor.probes`.
"""
