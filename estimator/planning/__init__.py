"""Planning: from a job and hardware to ranked plans."""
