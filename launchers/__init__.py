"""Execution of a Plan: data, weights, the gang of processes, training engines, checkpoints, export.

Depends on Plans, not on Metaflow. Torch, torchtune and DeepSpeed are imported only in training processes.
"""

METAFLOW_PACKAGE_POLICY = "include"  # a remote task gets this package with all its files
