from support.reference import *  # noqa: F403
