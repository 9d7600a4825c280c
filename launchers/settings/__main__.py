"""Write the JSON Schema of the settings: ``python -m launchers.settings``."""

import json

from launchers.settings.description import SCHEMA_FILE, json_schema

SCHEMA_FILE.write_text(json.dumps(json_schema(), indent=2) + "\n")
