"""Measurements of bucketfeed beside its peers, on data and a store that this folder makes itself."""
