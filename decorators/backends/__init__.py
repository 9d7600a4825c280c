"""From a plan to Kubernetes and AWS Batch: what is asked for, whether it can be had, and the wait for it.

A step's request is one value (:class:`decorators.backends.interface.StepRequest`), made at the launch;
:mod:`decorators.backends.placing` has its backend turn it into the values of the step's decorators, and
:mod:`decorators.backends.pending` watches the wait. To add a backend: a folder whose ``backend.py`` fills in
:class:`decorators.backends.interface.ComputeBackend`, and its line in :mod:`decorators.backends.registry`.
What Metaflow itself must know of it is in :mod:`decorators._metaflow`.
"""
