"""What a user can mend: one line, without a traceback."""


class UserError(Exception):
    """Says what was given, the rule and the remedy, in one line; the command ends with exit code 2."""
