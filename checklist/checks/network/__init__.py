"""Ports, RDMA devices, EFA, connections between all nodes, packet loss."""
