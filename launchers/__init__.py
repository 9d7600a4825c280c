"""Runs a Plan: data, weights, the gang of processes, the training engines, checkpoints, export.

Knows Plans, not Metaflow. Torch, torchtune and DeepSpeed are imported only in the processes that train.
"""

METAFLOW_PACKAGE_POLICY = "include"  # a remote task gets this package whole
