"""From an index to batches: data sets, loaders, collate functions. The only layer below train with torch."""
