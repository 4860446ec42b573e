"""`python -m tasks.trainer.bench`."""

from tasks.trainer.bench.cli import main

main()
