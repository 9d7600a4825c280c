"""Training measured on this machine's GPUs and compared with predictions: ``python -m benchmarks.on_gpu``.

``cases`` says what is run and in which order, ``data`` on which rows, ``one_run`` runs one case in a process
of its own through the launchers, ``limited`` is what is laid over its engine, ``search`` finds the smallest
limit, ``session`` goes through the cases within the time, ``checks`` asks the checklist, ``rows`` and
``page`` write.
"""
