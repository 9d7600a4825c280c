METAFLOW_PACKAGE_POLICY = "include"  # a remote task gets this package whole
