"""``python -m dllm_sched``: see ``dllm_sched.cli``."""

import sys

from dllm_sched.cli import main

if __name__ == "__main__":
    sys.exit(main())
