"""``python -m dllm_sched``: see ``dllm_sched.cli``."""

import sys

if __name__ == "__main__":
    try:
        from dllm_sched.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())
