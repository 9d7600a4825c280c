"""A simulated cluster on one machine: real clients and servers, pods as processes."""
