"""Stands for Colab's own package in tests: the parts that bucketfeed calls, with Colab's names and errors."""
