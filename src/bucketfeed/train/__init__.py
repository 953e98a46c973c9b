"""A training loop over a loader: distributed, mixed precision, checkpoints, exact resume."""
