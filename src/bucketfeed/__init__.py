"""Feed a PyTorch training loop from a bucket."""
