"""Work and cards of the rejection sampling flow."""
