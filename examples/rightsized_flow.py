# A data flow without GPUs whose steps request what their earlier runs used
# python examples/rightsized_flow.py run --with kubernetes
"""Right-sizing: the first run requests what the flow says, later ones what the step used."""

from metaflow import FlowSpec, Parameter, gpu_profile, resources, step


class RightsizedFlow(FlowSpec):
    rows = Parameter("rows", default=1_000_000)

    @gpu_profile(rightsize=True)
    @resources(cpu=4, memory=16000)
    @step
    def start(self):
        import array

        numbers = array.array("d", range(self.rows))
        self.total = sum(numbers)
        self.next(self.end)

    @step
    def end(self):
        print(f"sum of {self.rows:,} rows: {self.total:,.0f}")


if __name__ == "__main__":
    RightsizedFlow()
