"""No test times anything: hypothesis' limit for an example would, on a busy machine."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
