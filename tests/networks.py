from support.networks import *  # noqa: F403
