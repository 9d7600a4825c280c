"""Process helpers that know nothing of training: imports, work folders, request processes."""
