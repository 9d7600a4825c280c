"""Conversion of a checkpoint to any number of processes, by DeepSpeed's own tool.

``python -m launchers.engines.deepspeed.conversion --input_folder FOLDER --output_folder FOLDER`` takes the
options of ``ds_to_universal``, which executes pickled code in the files. Here only tensors are read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from estimator.errors import UserError
from launchers.engines.deepspeed.checkpoint import plain_classes
from launchers.engines.tensors_only import tensors_only


def main() -> None:
    """Run the tool; exit with status 1 and one line if a file holds more than tensors."""
    arguments = ds_to_universal.parse_arguments()
    try:
        with tensors_only(Path(arguments.input_folder), plain_classes()):
            ds_to_universal.main(arguments)
    except UserError as error:
        sys.exit(error.problem)


if __name__ == "__main__":
    main()
