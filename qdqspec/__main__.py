"""The command ``qdqspec``, also as ``python -m qdqspec``."""

import sys

INTERRUPTED = 130  # the convention of shells


def main() -> int:
    """Run one command and return the exit code. An interrupt of imports prints no traceback."""
    try:
        from qdqspec.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
