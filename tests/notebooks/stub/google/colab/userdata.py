"""The notebook's secrets: here those of the environment, by `SECRET_<name>`; "closed" is one without access."""

import os


class SecretNotFoundError(Exception):
    pass


class NotebookAccessError(Exception):
    pass


def get(key):
    value = os.environ.get(f"SECRET_{key}")
    if value is None:
        raise SecretNotFoundError(f"Secret {key} does not exist.")
    if value == "closed":
        raise NotebookAccessError(f"Notebook does not have access to secret {key}")
    return value
