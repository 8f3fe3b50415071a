"""`python -m pointup` is the `pointup` command, and `accelerate launch -m pointup` several."""

import sys

from pointup.cli.main import main

sys.exit(main())
