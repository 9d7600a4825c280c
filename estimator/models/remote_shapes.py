"""Shape of a model on the Hugging Face Hub or on S3, from its config.json; no weights are downloaded."""

from __future__ import annotations

from pathlib import Path

from estimator import remote
from estimator.errors import UserError
from estimator.models import hf_config, hf_files
from estimator.models.spec import ModelSpec
from estimator.untrusted import MAX_TEXT_BYTES, parse_json


def of_hub(hf_id: str, name: str) -> ModelSpec:
    """Read the shape of a model on the Hub, with the environment's token."""
    hub = remote.hub()
    with remote.hub_errors("model", hf_id):
        # Asked first because it fails at once without a network; the download would retry for 20 s.
        hub.model_info(hf_id, token=remote.hub_token())
        path = hub.hf_hub_download(hf_id, "config.json", token=remote.hub_token())
    return hf_files.read_directory(Path(path).parent, name)


def of_s3(url: str, name: str) -> ModelSpec:
    """Read the shape of a model below an s3:// URL."""
    file = f"{url}/config.json"
    bucket, key = remote.s3_location(file)
    with remote.s3_errors(file):
        body = remote.s3_client().get_object(Bucket=bucket, Key=key)["Body"].read(MAX_TEXT_BYTES)
    try:
        config = parse_json(body)
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}.", "Upload it again.") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object.")
    return hf_config.to_spec(config, name)
