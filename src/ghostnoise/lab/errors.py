"""The exception for errors that the user can correct, which are printed in one line without a traceback."""


class UserError(Exception):
    """An error with a one-line message: what was given, the rule, and the remedy. Commands exit with code 2."""
