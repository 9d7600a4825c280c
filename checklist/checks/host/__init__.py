"""Machine: clocks, versions, limits, kernel settings, cgroup."""
