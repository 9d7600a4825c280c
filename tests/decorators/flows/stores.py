"""A flow whose step stores something in the datastore again and again, for at most a minute."""

from __future__ import annotations

import time

from metaflow import FlowSpec, retry, step

from decorators._metaflow import main
from decorators.gpu_profile import gpu_profile
from decorators.storage import datastore


class StoresFlow(FlowSpec):
    @gpu_profile()
    @retry(times=1, minutes_between_retries=0)
    @step
    def start(self):
        for number in range(300):
            datastore().put_bytes("number", str(number).encode())
            if number == 3:
                print("stored", flush=True)
            time.sleep(0.2)
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    main(StoresFlow)
