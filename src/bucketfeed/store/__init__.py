"""From objects to bytes: manifests, range readers, retries. Knows nothing of samples."""
