"""Pure arithmetic on measurements: who is at fault, whose packets are lost, what a bandwidth means."""
