"""``python -m qdqspec``."""

import sys

from qdqspec.cli import main

sys.exit(main())
