"""Values computed once before training: image latents, texts, reference log-probabilities."""
