METAFLOW_PACKAGE_POLICY = "include"  # the code package of a remote task contains this package
