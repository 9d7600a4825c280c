"""Where a host is: from the environment, else from the cloud's metadata service, if it can be reached."""

from __future__ import annotations

import http.client
import os
from dataclasses import dataclass

_ZONES = ("NODE_ZONE", "TOPOLOGY_ZONE", "AVAILABILITY_ZONE")  # as a pod's downward API may set them
_METADATA = "169.254.169.254"
_LIMIT_S = 1.0  # a blocked service doesn't answer at all


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What is known of a host's place; None: it isn't."""

    zone: str | None = None
    instance: str | None = None
    instance_type: str | None = None
    placement_group: str | None = None


def place() -> Place:
    """The environment's word counts before the metadata service's."""
    said = next((os.environ[name] for name in _ZONES if os.environ.get(name)), None)
    kind = os.environ.get("NODE_INSTANCE_TYPE")
    service = _Service() if not (said and kind) and not _metadata_disabled() else None
    return Place(
        zone=said or (service.get("placement/availability-zone") if service else None),
        instance=service.get("instance-id") if service else None,
        instance_type=kind or (service.get("instance-type") if service else None),
        placement_group=service.get("placement/group-name") if service else None,
    )


def _metadata_disabled() -> bool:
    return os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"  # the AWS SDKs' switch


class _Service:
    """EC2's metadata, with a session token (IMDSv2). Nothing is asked again once it did not answer."""

    def __init__(self) -> None:
        self._token = self._ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})

    def get(self, path: str) -> str | None:
        if self._token is None:
            return None
        return self._ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> str | None:
        connection = http.client.HTTPConnection(_METADATA, timeout=_LIMIT_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            text = answer.read(4096).decode()
        except (OSError, http.client.HTTPException, UnicodeDecodeError):
            return None
        finally:
            connection.close()
        return text if answer.status == http.client.OK else None
