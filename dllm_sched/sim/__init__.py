"""Virtual time: workloads and service times for replaying traffic. Import the module you need."""

try:
    import numpy as np  # noqa: F401
except ImportError as error:
    raise ImportError("dllm_sched.sim needs numpy: pip install 'dllm-sched[sim]'") from error
