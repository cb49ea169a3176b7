from support.families import *  # noqa: F403
