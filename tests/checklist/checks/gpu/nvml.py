"""A simulated NVML for machines without GPUs, with the constants of the real binding."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import pynvml


class Gpu:
    """Responses of one GPU. Values that are not set are unsupported."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.fields: dict[tuple[int, int], int] = {}

    def field(self, name: str, value: int, links: int = 0) -> Gpu:
        """Return a field value; with ``links`` the same value for each link."""
        for scope in range(max(links, 1)):
            self.fields[getattr(pynvml, name), scope] = value
        return self


class Nvml:
    """The library over some GPUs; a GPU is its own handle."""

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDevice"):
            return getattr(pynvml, name)

        def query(gpu: Gpu, *arguments: Any) -> Any:
            answer = gpu.answers.get(name)
            if isinstance(answer, Mapping):
                answer = answer.get(arguments[0] if arguments else None)
            if answer is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer(*arguments) if callable(answer) else answer

        return query

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, requested_fields: list[Any]) -> Any:  # noqa: N802
        values = (pynvml.c_nvmlFieldValue_t * len(requested_fields))()
        for value, one in zip(values, requested_fields, strict=True):
            key = one if isinstance(one, tuple) else (one, 0)
            value.fieldId, value.scopeId = key
            known_value = gpu.fields.get(key)
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if known_value is None else pynvml.NVML_SUCCESS
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.value.ullVal = known_value or 0
        return values


def fabric(
    state: int, status: int = 0, cluster: str = str(uuid.UUID(int=0)), clique: int = 0, mask: int = 0
) -> Any:
    """Fill the struct passed to nvmlDeviceGetGpuFabricInfoV."""

    def fill(info: Any) -> int:
        reported = info._obj  # of ctypes.byref
        reported.state, reported.status, reported.cliqueId, reported.healthMask = state, status, clique, mask
        reported.clusterUuid = type(reported.clusterUuid)(*uuid.UUID(cluster).bytes)
        return 0

    return fill
