"""A checkpoint's files rewritten for any number of processes, by DeepSpeed's own tool.

``python -m launchers.engines.deepspeed.conversion --input_folder FOLDER --output_folder FOLDER``, with what
``ds_to_universal`` takes besides. Without this, it executes pickled code in the files; here it reads tensors
only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from estimator.errors import UserError
from launchers.engines.deepspeed.checkpoint import plain_classes
from launchers.engines.tensors_only import tensors_only


def main() -> None:
    """Ends with status 1 and one line where a file holds more than tensors."""
    arguments = ds_to_universal.parse_arguments()
    try:
        with tensors_only(Path(arguments.input_folder), plain_classes()):
            ds_to_universal.main(arguments)
    except UserError as error:
        sys.exit(error.problem)


if __name__ == "__main__":
    main()
