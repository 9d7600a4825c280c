"""From a job and a place to ranked plans."""
