"""Read and write rates of disks and shared storage."""
