"""For tests, ours and yours: a mocked S3, readers that record, delay and fail, pytest fixtures."""
