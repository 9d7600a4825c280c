"""Is this cluster fit to train on, and if not, which node, link, direction or GPU is at fault?

Probes measure (:mod:`checklist.measurements`), the rest judges: pure functions from measurements to a
:class:`~checklist.result.Result`. Knows torch.distributed, not Metaflow; torch is imported only in the
processes that probe.
"""

METAFLOW_PACKAGE_POLICY = "include"  # a remote task gets this package whole, tables included
