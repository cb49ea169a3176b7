from support.closeness import *  # noqa: F403
