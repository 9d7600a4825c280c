"""The nearest thing to a cluster that one machine can be: real clients and servers, pods as processes."""
