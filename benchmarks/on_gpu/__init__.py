"""Training measured on this machine's GPUs and compared with predictions: ``python -m benchmarks.on_gpu``.

``cases`` lists the runs in order, ``data`` writes training rows, ``one_run`` runs one case through the
launchers in a separate process, ``limited`` wraps its engine with a memory limit, ``search`` finds the
smallest limit, ``session`` runs the cases within a time limit, ``checks`` runs the checklist, ``rows`` and
``page`` write the results.
"""
