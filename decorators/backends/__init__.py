"""Running a plan's steps on Kubernetes and AWS Batch: resource requests, preflight checks, and waiting for
nodes.

A step's request (:class:`decorators.backends.interface.StepRequest`) is built at launch.
:mod:`decorators.backends.placing` lets the backend convert it to values of the step's decorators, and
:mod:`decorators.backends.pending` watches the wait. To add a backend, add a folder whose ``backend.py``
defines a :class:`decorators.backends.interface.ComputeBackend`, and a line in
:mod:`decorators.backends.registry`. The parts that depend on Metaflow's internals are in
:mod:`decorators._metaflow`.
"""
