"""Options of Metaflow's ``run``, and those that print help."""

OF_METAFLOW = {
    "--tag": "Tag of the run; may be repeated",
    "--namespace": "Metaflow namespace in which past runs are looked up",
    "--with": "Decorator for all steps, such as kubernetes:image=NAME; may be repeated",
    "--max-workers": "Maximum number of steps that run at the same time",
    "--max-num-splits": "Maximum number of splits of a foreach",
    "--max-log-size": "Maximum log size of a step in MB; longer logs are truncated",
    "--run-id-file": "File to which the id of the run is written",
    "--runner-attribute-file": "File for Metaflow's Runner API",
}
"""Options with their help."""

HELP_ALL = "--help-all"
HELP = frozenset({"--help", "-h", HELP_ALL})
