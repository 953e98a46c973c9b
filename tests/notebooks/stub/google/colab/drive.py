"""Mounting of Google Drive, which bucketfeed never asks for."""


def mount(path):
    raise AssertionError("the notebook mounted Google Drive")
