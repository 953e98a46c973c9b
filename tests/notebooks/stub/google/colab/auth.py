"""Google's sign-in: here it notes in the environment that it was called, and fails where `REFUSE_SIGN_IN` is set."""

import os


def authenticate_user():
    if "REFUSE_SIGN_IN" in os.environ:
        raise RuntimeError("Failed to fetch user credentials")
    os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = "/content/.adc/adc.json"
