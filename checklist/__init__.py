"""Test whether a cluster is fit for training, and name the node, link, direction or GPU at fault.

Probes measure (:mod:`checklist.measurements`); judges are pure functions from measurements to a
:class:`~checklist.result.Result`. The package uses torch.distributed, not Metaflow; torch is imported only
in processes that run probes.
"""

METAFLOW_PACKAGE_POLICY = "include"  # a remote task gets this package whole, tables included
