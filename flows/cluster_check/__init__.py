"""Steps, cards and launch options of the checklist flow, and the gate that reads its newest result."""
