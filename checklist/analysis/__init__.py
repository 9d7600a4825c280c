"""Pure arithmetic on measurements: localization of faults and packet loss, expected bandwidths."""
