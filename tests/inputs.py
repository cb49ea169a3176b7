from support.inputs import *  # noqa: F403
