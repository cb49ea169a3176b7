from support.passes import *  # noqa: F403
