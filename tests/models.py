from support.models import *  # noqa: F403
