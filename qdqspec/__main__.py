"""The command ``qdqspec``, also as ``python -m qdqspec``."""

import gc
import io
import signal
import sys


def main() -> int:
    """Run one command and return the exit code. An interrupt of imports prints no traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have letters that its encoding lacks
    try:
        from qdqspec.app.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted\n")
        return 128 + signal.SIGINT  # the convention of shells
    finally:
        gc.freeze()  # the process ends: Python need not visit all objects once more


if __name__ == "__main__":
    sys.exit(main())
