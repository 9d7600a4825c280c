"""A flow of three steps whose memory follows a parameter and that is killed if it has too little."""

from __future__ import annotations

from metaflow import FlowSpec, Parameter, gpu_profile, resources, step

from decorators.usage import requested_sizes

MIB = 2**20


def use(mib):
    """Hold this much memory for a moment."""
    held = bytearray(mib * MIB)
    held[::4096] = b"x" * len(held[::4096])
    return len(held)


class SizedFlow(FlowSpec):
    mib = Parameter("mib", default=100)
    limited = Parameter("limited", default=False, help="End with a MemoryError above the requested memory.")

    @step
    def start(self):
        self.next(self.small)

    @gpu_profile(rightsize=True)
    @resources(cpu=4, memory=8000)
    @step
    def small(self):
        self.requested = requested_sizes("small")
        use(20)
        self.next(self.large)

    @gpu_profile(rightsize=True)
    @resources(memory=8000)
    @step
    def large(self):
        self.requested = requested_sizes("large")
        need = self.mib + 150  # with Python itself
        if self.limited and need > self.requested.memory_mib:
            use(self.mib // 4)
            raise MemoryError(f"{need} MiB")
        use(self.mib)
        self.next(self.end)

    @gpu_profile(memory="1GiB", cpu=2)
    @step
    def end(self):
        self.requested = requested_sizes("end")


if __name__ == "__main__":
    SizedFlow()
