"""`python -m kernels.bench`."""

from kernels.bench.cli import main

main()
