"""From a plan to Kubernetes and AWS Batch: what is asked for, whether it can be had, and the wait for it.

Add a backend: a module with ``values``, a ``preflight_*`` with ``look``, a ``waiting_*`` with ``look`` and
``end``; :mod:`decorators.backends.placing` puts them together.
"""
