"""Infrastructure shared by gang and checklist: allocation, channel between nodes, rendezvous, processes."""
